// Elements, made of text and never of markup: names come from whoever runs kernels here.

export const byId = (id) => document.getElementById(id);

/** Make an element: properties, `data` and `aria`, classes; children are elements or text. */
export function h(tag, { data, aria, cls, on, role, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  if (cls) element.className = cls;
  if (role) element.setAttribute("role", role);
  for (const [name, value] of Object.entries(data ?? {})) element.dataset[name] = value;
  for (const [name, value] of Object.entries(aria ?? {})) element.setAttribute(`aria-${name}`, value);
  for (const [name, listener] of Object.entries(on ?? {})) element.addEventListener(name, listener);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Have a list show other things, without touching those that are the same. */
export function fill(list, children) {
  children.forEach((child, index) => {
    const current = list.children[index];
    if (!current) list.append(child);
    else if (current.outerHTML !== child.outerHTML) current.replaceWith(child);
  });
  while (list.children.length > children.length) list.lastElementChild.remove();
}

/**
 * Draw parts from the next frame on, however often that is asked for. Each is a task of its own, so
 * that keys and pointers are heard in between.
 */
export function inFrames(...parts) {
  let isAsked = false;
  let isDrawing = false;
  const drawAll = async () => {
    isDrawing = true;
    try {
      while (isAsked) {
        isAsked = false;
        await new Promise(requestAnimationFrame);
        for (const part of parts) {
          part();
          await new Promise((resolve) => setTimeout(resolve));
        }
      }
    } finally {
      isDrawing = false;
    }
  };
  return () => {
    isAsked = true;
    if (!isDrawing) drawAll();
  };
}
