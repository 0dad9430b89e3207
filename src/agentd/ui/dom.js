// Elements, made of text and never of markup: names come from whoever runs kernels here.

export const byId = (id) => document.getElementById(id);

/** Make an element: properties, `data` and `aria`, classes; children are elements or text. */
export function h(tag, { data, aria, cls, on, role, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  if (cls) made.className = cls;
  if (role) made.setAttribute("role", role);
  for (const [name, value] of Object.entries(data ?? {})) made.dataset[name] = value;
  for (const [name, value] of Object.entries(aria ?? {})) made.setAttribute(`aria-${name}`, value);
  for (const [name, listener] of Object.entries(on ?? {})) made.addEventListener(name, listener);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Have a list show other things, without touching those that are the same. */
export function fill(list, children) {
  children.forEach((child, index) => {
    const shown = list.children[index];
    if (!shown) list.append(child);
    else if (shown.outerHTML !== child.outerHTML) shown.replaceWith(child);
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
