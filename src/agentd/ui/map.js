// The node as a map: a row for each device name, a cell for each device, in NUMA order.

import { byId, fill, h } from "./dom.js";
import { amount } from "./format.js";
import { grouped, keyOf, nameOf, natural, order } from "./store.js";

const COLOURS = 8;
const GLYPHS = {
  ok: "", held: "h", unhealthy: "!", drained: "d", gone: "×", withheld: "w", overcommitted: "+", busy: "b",
};
const MEANINGS = {
  held: "held by what still runs", unhealthy: "unhealthy", drained: "drained",
  gone: "gone", withheld: "withheld", overcommitted: "more given than there is",
  busy: "used without a claim",
};
const LARGE = 16;
const MEDIUM = 64;

export class DeviceMap {
  constructor(store, { opened, pointed }) {
    this.store = store;
    this.opened = opened;
    this.pointed = pointed;
    this.cells = new Map();
    this.shape = "";
    this.root = byId("map");
    this.tip = byId("tip");
  }

  colourOf(agent) {
    const index = this.store.agents.findIndex((candidate) => candidate.agent_id === agent);
    return index < 0 ? "other" : String(index % COLOURS);
  }

  draw() {
    if (this.version === this.store.version) return;
    this.version = this.store.version;
    const groups = this.#groups();
    const shape = JSON.stringify(groups.map(([name, devices]) => [
      name, devices.map((device) => [device.id, device.numa_node]),
    ]));
    if (shape !== this.shape) {
      this.shape = shape;
      this.cells.clear();
      this.root.replaceChildren(...groups.map(([name, devices]) => this.#row(name, devices)));
    }
    for (const [key, cell] of this.cells) this.#show(cell, this.store.devices.get(key));
    for (const [name, devices] of groups) this.#count(name, devices);
    this.#legend();
  }

  /** Light up the devices of a kernel; of none, take the light away. */
  light(kernelId) {
    for (const [key, cell] of this.cells) {
      const holders = this.store.devices.get(key)?.holders ?? [];
      cell.classList.toggle("lit", holders.some((holder) => holder.kernel_id === kernelId));
    }
    this.root.classList.toggle("dimmed", Boolean(kernelId));
  }

  #groups() {
    const groups = grouped(this.store.devices.values(), (device) => device.device_name);
    for (const devices of groups.values()) {
      devices.sort((one, other) => (one.numa_node ?? Infinity) - (other.numa_node ?? Infinity) || natural(one.id, other.id));
    }
    return [...groups].sort(([one], [other]) => order(one, other));
  }

  #row(name, devices) {
    const size = devices.length <= LARGE ? "large" : devices.length <= MEDIUM ? "medium" : "small";
    const nodes = grouped(devices, (device) => device.numa_node);
    const blocks = [...nodes].map(([node, members]) => {
      const label = node === null ? null : h("span", { cls: "numa" }, `NUMA ${node}`);
      return h("div", { cls: "block" }, label, h("div", { cls: "cells" }, ...members.map((device) => this.#cell(device))));
    });
    const title = h("h3", {}, name, h("small", { data: { count: name } }));
    const row = h("div", {
      cls: `row ${size}`, role: "group", aria: { label: `devices ${name}` },
      on: { keydown: (event) => this.#walk(event, row) },
    }, title, h("div", { cls: "blocks" }, ...blocks));
    const first = row.querySelector("button");
    if (first) first.tabIndex = 0;
    return row;
  }

  #cell(device) {
    const key = keyOf(device.device_name, device.id);
    const cell = h("button", {
      type: "button", cls: "cell", tabIndex: -1,
      on: {
        click: () => this.opened(key),
        pointerenter: () => this.#point(cell, key),
        focus: () => this.#point(cell, key),
        pointerleave: () => this.#leave(),
        blur: () => this.#leave(),
      },
    }, h("span", { cls: "fill" }), h("span", { cls: "name" }), h("span", { cls: "glyph" }));
    this.cells.set(key, cell);
    return cell;
  }

  #show(cell, device) {
    if (!device) return;
    const capacity = Number(device.capacity);
    const shares = new Map();
    for (const holder of device.holders) {
      const agent = this.store.holder(holder)?.agent_id ?? "";
      shares.set(agent, (shares.get(agent) ?? 0) + Number(holder.amount));
    }
    const version = JSON.stringify([device, [...shares]]);
    if (cell.shows === version) return;
    cell.shows = version;
    cell.dataset.state = device.state;
    cell.dataset.owner = device.agents.length === 1 ? this.colourOf(device.agents[0]) : "";
    const used = capacity ? Number(device.allocated) / capacity : device.holders.length ? 1 : 0;
    const total = [...shares.values()].reduce((sum, share) => sum + share, 0) || 1;
    const [bar, name, glyph] = cell.children;
    bar.replaceChildren(...[...shares].map(([agent, share]) => {
      const part = h("span", { data: { colour: this.colourOf(agent) } });
      part.style.blockSize = `${Math.min(1, used) * (share / total) * 100}%`;
      return part;
    }));
    name.textContent = device.id.length > 10 ? `…${device.id.slice(-8)}` : device.id;
    glyph.textContent = GLYPHS[device.state] ?? "?";
    cell.setAttribute("aria-label", describe(device, this.store).join(", "));
  }

  #count(name, devices) {
    const names = [...new Set(devices.flatMap((device) => Object.keys(device.slots)))];
    const sum = (slot, member) => devices.reduce((total, device) => total + Number(device.slots[slot]?.[member] ?? 0), 0);
    const parts = names.map((slot) => {
      const kind = this.store.slots.get(slot)?.kind;
      const free = `${amount(sum(slot, "free"), kind)} of ${amount(sum(slot, "capacity"), kind)}`;
      return names.length > 1 ? `${free} ${slot} free` : `${free} free`;
    });
    const text = parts.join(", ");
    const label = this.root.querySelector(`small[data-count="${CSS.escape(name)}"]`);
    if (label && label.textContent !== text) label.textContent = text;
  }

  #legend() {
    const states = new Set([...this.store.devices.values()].map((device) => device.state));
    const agents = this.store.agents.map((agent) => h("li", {},
      h("span", { cls: "swatch", data: { colour: this.colourOf(agent.agent_id) } }), agent.agent_id));
    const wrong = Object.entries(MEANINGS).filter(([state]) => states.has(state)).map(([state, meaning]) =>
      h("li", {}, h("span", { cls: "swatch", data: { state } }, GLYPHS[state]), meaning));
    fill(byId("legend"), [...agents, ...wrong]);
  }

  #point(cell, key) {
    const device = this.store.devices.get(key);
    if (!device) return;
    this.tip.replaceChildren(...describe(device, this.store).map((line) => h("div", {}, line)));
    this.tip.hidden = false;
    const box = cell.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - this.tip.offsetWidth - 8);
    const below = box.bottom + 6 + this.tip.offsetHeight < innerHeight;
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${below ? box.bottom + 6 : box.top - this.tip.offsetHeight - 6}px`;
    this.pointed(new Set(device.holders.flatMap((holder) => holder.kernel_id ?? [])));
  }

  #leave() {
    this.tip.hidden = true;
    this.pointed(new Set());
  }

  /** Arrow keys go from cell to cell; Tab goes from row to row. */
  #walk(event, row) {
    const cells = [...row.querySelectorAll(".cell")];
    const index = cells.indexOf(document.activeElement);
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const target = event.key === "Home" ? 0 : event.key === "End" ? cells.length - 1 : index + (steps[event.key] ?? NaN);
    if (index < 0 || !cells[target]) return;
    event.preventDefault();
    cells[index].tabIndex = -1;
    cells[target].tabIndex = 0;
    cells[target].focus();
  }
}

/** Say what a device is, in lines. */
export function describe(device, store) {
  const kindOf = (name) => store.slots.get(name)?.kind;
  const slots = Object.entries(device.slots);
  const amountsOf = (holder) => Object.entries(holder.amounts).map(([name, text]) => amount(text, kindOf(name))).join(" and ");
  const holders = device.holders.slice(0, 6).map((holder) => `${nameOf(holder)} has ${amountsOf(holder) || "all"}`);
  const hiddenCount = device.holders.length - holders.length;
  return [
    `${device.device_name} ${device.id}${device.model ? ` (${device.model})` : ""}`,
    device.state === "ok" ? "ok" : `${device.state}${device.reason ? `: ${device.reason}` : ""}`,
    ...slots.map(([name, use]) => {
      const used = `${amount(use.allocated, kindOf(name))} of ${amount(use.capacity, kindOf(name))}`;
      return slots.length > 1 ? `${used} ${name} used` : `${used} used`;
    }),
    ...(device.numa_node === null ? [] : [`NUMA node ${device.numa_node}`]),
    device.agents.length ? `for ${device.agents.join(", ")}` : "for no agent",
    ...holders,
    ...(hiddenCount > 0 ? [`and ${hiddenCount} more`] : []),
  ];
}
