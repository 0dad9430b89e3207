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

/** Have a list show other things, without touching it where nothing has changed. */
export function fill(list, children) {
  const text = children.map((child) => child.outerHTML).join("");
  if (list.shows !== text) {
    list.shows = text;
    list.replaceChildren(...children);
  }
}

/** Call `draw` once in the next frame, however often it is asked for. */
export function inFrame(draw) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  };
}
