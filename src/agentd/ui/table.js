// The kernels: only the rows that can be seen are there, so a thousand cost no more than thirty.

import { draw } from "./chart.js";
import { byId, h } from "./dom.js";
import { age, bytes, cores, percent } from "./format.js";
import { isEnded, natural } from "./store.js";

const BEYOND = 4;
const COLUMNS = [
  ["kernel", "Kernel", (kernel) => kernel.kernel_id],
  ["state", "State", (kernel) => kernel.state],
  ["agent", "Agent", (kernel) => kernel.agent_id],
  ["age", "Age", (kernel) => -Date.parse(kernel.created_at)],
  ["has", "Has", (kernel) => -Object.keys(kernel.slots).length],
  ["cpu", "CPU", (kernel, store) => -(store.latest(kernel.kernel_id, "cpu") ?? -1)],
  ["memory", "Memory", (kernel, store) => -(store.latest(kernel.kernel_id, "memory") ?? -1)],
  ["load", "Device load", (kernel, store) => -(store.latest(kernel.kernel_id, "load") ?? -1)],
];

export class KernelTable {
  constructor(store, { opened, pointed }) {
    this.store = store;
    this.opened = opened;
    this.pointed = pointed;
    this.sort = { column: "age", isReversed: false };
    this.lit = new Set();
    this.shown = [];
    this.rows = [];
    this.box = byId("rows");
    this.space = h("div", { cls: "space", role: "presentation" });
    this.box.append(this.space);
    this.box.addEventListener("scroll", () => this.#place(), { passive: true });
    this.#drawHead();
    for (const id of ["find", "states"]) byId(id).addEventListener("input", () => this.draw());
    new ResizeObserver(() => this.#place()).observe(this.box);
  }

  draw() {
    const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const state = byId("states").value;
    const fits = (kernel) => {
      if (state === "running" && kernel.state !== "running") return false;
      if (state && state !== "running" && isEnded(kernel) !== (state === "ended")) return false;
      return !words.length || words.every((word) => searched(kernel).includes(word));
    };
    const kernels = [...this.store.kernels.values()].filter(fits);
    const [, , key] = COLUMNS.find(([name]) => name === this.sort.column);
    const keys = new Map(kernels.map((kernel) => [kernel, key(kernel, this.store)]));
    const sign = this.sort.isReversed ? -1 : 1;
    kernels.sort((one, other) => {
      const [a, b] = [keys.get(one), keys.get(other)];
      const order = typeof a === "number" ? a - b : natural(a, b);
      return sign * (order || natural(one.kernel_id, other.kernel_id));
    });
    this.shown = kernels;
    byId("kernels").setAttribute("aria-rowcount", String(kernels.length + 1));
    const text = `${kernels.length} of ${this.store.kernels.size}`;
    if (byId("shown").textContent !== text) byId("shown").textContent = text;
    this.#place();
  }

  /** Light up the rows of kernels. */
  light(kernelIds) {
    this.lit = kernelIds;
    for (const row of this.rows) row.classList.toggle("lit", kernelIds.has(row.kernelId));
  }

  #drawHead() {
    byId("head").replaceChildren(...COLUMNS.map(([column, title]) => {
      const isSorted = this.sort.column === column;
      const order = isSorted ? (this.sort.isReversed ? "descending" : "ascending") : "none";
      const button = h("button", { type: "button", on: { click: () => this.#sortBy(column) } }, title,
        h("span", { aria: { hidden: "true" } }, isSorted ? (this.sort.isReversed ? " ↑" : " ↓") : ""));
      return h("div", { role: "columnheader", cls: `c-${column}`, aria: { sort: order } }, button);
    }));
  }

  #sortBy(column) {
    this.sort = { column, isReversed: this.sort.column === column && !this.sort.isReversed };
    this.#drawHead();
    this.draw();
    byId("head").querySelector(`.c-${column} button`).focus();
  }

  /** Have rows for what can be seen, and nothing else. */
  #place() {
    const height = parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 40;
    byId("head").style.paddingInlineEnd = `calc(.4rem + ${this.box.offsetWidth - this.box.clientWidth}px)`;
    this.space.style.blockSize = `${Math.max(1, this.shown.length) * height}px`;
    const first = Math.max(0, Math.floor(this.box.scrollTop / height) - BEYOND);
    const last = Math.min(this.shown.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / height) + BEYOND);
    while (this.rows.length < last - first) this.rows.push(this.#made());
    this.rows.forEach((row, index) => {
      const kernel = first + index < last ? this.shown[first + index] : undefined;
      row.hidden = !kernel;
      if (kernel) this.#show(row, kernel, first + index, height);
    });
    byId("kernels").classList.toggle("empty", !this.shown.length);
  }

  #made() {
    const name = h("button", { type: "button", on: { click: () => this.opened(row.kernelId) } });
    const curve = (column) => h("div", { role: "cell", cls: `c-${column} curve` },
      h("canvas", { aria: { hidden: "true" } }), h("span", {}));
    const cell = (column, ...children) => h("div", { role: "cell", cls: `c-${column}` }, ...children);
    const row = h("div", {
      role: "row", cls: "kernel",
      on: {
        pointerenter: () => this.pointed(row.kernelId),
        pointerleave: () => this.pointed(null),
        focusin: () => this.pointed(row.kernelId),
        focusout: () => this.pointed(null),
      },
    }, cell("kernel", name), cell("state"), cell("agent"), cell("age"), cell("has"),
    curve("cpu"), curve("memory"), curve("load"));
    this.space.append(row);
    return row;
  }

  #show(row, kernel, index, height) {
    row.kernelId = kernel.kernel_id;
    row.style.transform = `translateY(${index * height}px)`;
    row.setAttribute("aria-rowindex", String(index + 2));
    row.dataset.state = kernel.state;
    row.classList.toggle("lit", this.lit.has(kernel.kernel_id));
    const [name, state, agent, since, has, cpu, memory, load] = row.children;
    put(name.firstChild, kernel.kernel_id);
    put(state, kernel.oom_killed ? "out of memory" : kernel.state);
    state.title = kernel.reason;
    put(agent, kernel.agent_id);
    put(since, isEnded(kernel) ? `ended ${age(kernel.finished_at)} ago` : age(kernel.created_at));
    put(has, holding(kernel));
    has.title = has.textContent;
    const figures = this.store.figures.get(kernel.kernel_id);
    const limit = figures?.last?.memory_limit_bytes;
    show(cpu, figures?.cpu, Number(kernel.slots.cpu ?? 1) || 1, cores);
    show(memory, figures?.memory, limit, bytes);
    show(load, figures?.load, 1, percent);
  }
}

function show(cell, points, minimumTop, format) {
  put(cell.lastChild, format(points?.at(-1)));
  draw(cell.firstChild, points ?? [], minimumTop);
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Say what a kernel holds: how many devices of which name, accelerators first. */
export function holding(kernel) {
  const isOfHost = ([name]) => Number(name === "cpu" || name === "mem");
  const holdings = Object.entries(kernel.allocation).sort((one, other) => isOfHost(one) - isOfHost(other));
  return holdings.map(([name, slots]) => {
    const ids = new Set(Object.values(slots).flatMap((amounts) => Object.keys(amounts)));
    if (name === "mem") return `mem ${bytes(Number(kernel.slots.mem ?? 0))}`;
    return `${ids.size} ${name}`;
  }).join(" · ") || "–";
}

function searched(kernel) {
  const labels = Object.entries(kernel.labels).map(([name, value]) => `${name}=${value}`);
  const devices = Object.values(kernel.allocation).flatMap((slots) => Object.values(slots).flatMap(Object.keys));
  return [kernel.kernel_id, kernel.agent_id, kernel.image ?? "", kernel.state, ...labels, ...devices]
    .join(" ").toLowerCase();
}
