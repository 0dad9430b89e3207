// What is known of the node, and how its kernels' figures went.

import { get, list } from "./api.js";

export const POINTS = 60;
export const STATS_MS = 5000;
const MOST_REFUSALS = 1024;
const ENDED = new Set(["terminated", "failed", "lost"]);

export const natural = new Intl.Collator("en", { numeric: true }).compare;
/** Accelerators first, then cores and memory. */
export const order = (one, other) => rank(one) - rank(other) || natural(one, other);
const rank = (name) => ["cpu", "mem"].indexOf(name);
/** Return lists of things by what `key` says of each. */
export function grouped(things, key) {
  const groups = new Map();
  for (const thing of things) {
    const group = groups.get(key(thing));
    if (group) group.push(thing);
    else groups.set(key(thing), [thing]);
  }
  return groups;
}

export const nameOf = (held) => (held.claim_id === undefined ? held.kernel_id : `claim ${held.claim_id}`);
export const keyOf = (name, id) => `${name}\n${id}`;
export const isEnded = (kernel) => ENDED.has(kernel.state);

export class Store {
  constructor() {
    this.caller = null;
    this.node = null;
    this.devices = new Map();
    this.agents = [];
    this.slots = new Map();
    this.kernels = new Map();
    this.claims = new Map();
    this.refusals = [];
    this.figures = new Map();
    /** Counts changes of what is free, which most of the page hangs on. */
    this.version = 0;
  }

  /** Look at everything anew. */
  async load() {
    const [caller, node, devices, agents, slots, kernels, claims, refusals] = await Promise.all([
      get("/v1/whoami"),
      get("/v1/node"),
      get("/v1/devices"),
      get("/v1/agents"),
      get("/v1/slot-types"),
      list("/v1/kernels"),
      list("/v1/claims"),
      get("/v1/refusals"),
    ]);
    Object.assign(this, { caller, node, refusals });
    this.slots = new Map(slots.map((slot) => [slot.name, slot]));
    this.#keep(devices, agents);
    this.kernels = new Map(kernels.map((kernel) => [kernel.kernel_id, kernel]));
    this.claims = new Map(claims.map((claim) => [claim.claim_id, claim]));
    for (const id of this.figures.keys()) if (!this.kernels.has(id)) this.figures.delete(id);
  }

  /** Look again at what changes with kernels: what is free, and who has it. */
  async loadFree() {
    const [devices, agents] = await Promise.all([get("/v1/devices"), get("/v1/agents")]);
    this.#keep(devices, agents);
  }

  #keep(devices, agents) {
    this.agents = agents;
    this.devices = new Map(devices.map((device) => [keyOf(device.device_name, device.id), device]));
    this.version += 1;
  }

  async loadNode() {
    const [node, slots] = await Promise.all([get("/v1/node"), get("/v1/slot-types")]);
    this.node = node;
    this.slots = new Map(slots.map((slot) => [slot.name, slot]));
    this.version += 1;
  }

  /** Take in an event; say what has to be looked at again. */
  take({ kind, content }) {
    switch (kind) {
      case "kernel":
        this.kernels.set(content.kernel_id, content);
        return "free";
      case "kernel-removed":
        this.kernels.delete(content.kernel_id);
        this.figures.delete(content.kernel_id);
        return "free";
      case "claim":
        this.claims.set(content.claim_id, content);
        return "free";
      case "claim-removed":
        this.claims.delete(content.claim_id);
        return "free";
      case "device":
        this.version += 1;
        this.devices.set(keyOf(content.device_name, content.id), content);
        return "free";
      case "device-removed":
        this.version += 1;
        this.devices.delete(keyOf(content.device_name, content.id));
        return "free";
      case "free":
        return "free";
      case "refusal":
        if (!this.refusals.some((known) => JSON.stringify(known) === JSON.stringify(content))) {
          this.refusals = [...this.refusals, content].slice(-MOST_REFUSALS);
        }
        return "refusals";
      case "plugin":
      case "runtime":
      case "condition":
      case "condition-removed":
        return "node";
      default:
        return "";
    }
  }

  /** Read what kernels use, and go on with their curves. */
  async loadStats() {
    for (const use of await get("/v1/stats")) {
      const kernel = this.kernels.get(use.kernel_id);
      if (!kernel) continue;
      const before = this.figures.get(use.kernel_id);
      const same = before && before.created === kernel.created_at ? before : null;
      const now = same ?? { created: kernel.created_at, cpu: [], memory: [], load: [], last: null };
      const seconds = now.last ? (Date.parse(use.at) - Date.parse(now.last.at)) / 1000 : 0;
      if (now.last && seconds <= 0) continue;
      const isKnown = now.last && use.cpu_seconds !== null && now.last.cpu_seconds !== null;
      const loads = use.devices.map((device) => device.utilization).filter((load) => load !== null);
      push(now.cpu, isKnown ? Math.max(0, use.cpu_seconds - now.last.cpu_seconds) / seconds : null);
      push(now.memory, use.memory_bytes);
      push(now.load, loads.length ? loads.reduce((sum, load) => sum + load, 0) / loads.length : null);
      now.last = use;
      this.figures.set(use.kernel_id, now);
    }
  }

  /** Return the kernel or claim that holds part of a device. */
  holder(held) {
    return held.claim_id === undefined ? this.kernels.get(held.kernel_id) : this.claims.get(held.claim_id);
  }

  latest(id, figure) {
    return this.figures.get(id)?.[figure].at(-1) ?? null;
  }

  may(right) {
    const role = this.caller?.role;
    return role === "admin" || (role === "agent" && right !== "node");
  }

  /** What is wrong; a node of an older version has the texts alone. */
  conditions() {
    const { conditions, warnings } = this.node;
    return conditions ?? warnings.map((reason) => ({ about: "host", reason, remedy: "", since: null }));
  }
}

function push(points, value) {
  points.push(value);
  if (points.length > POINTS) points.shift();
}
