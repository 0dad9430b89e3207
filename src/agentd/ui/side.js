// What is free, what is wrong, and why somebody was refused.

import { byId, fill, h } from "./dom.js";
import { age, amount, bytes } from "./format.js";
import { grouped, isEnded, order } from "./store.js";

const HOUR_MS = 3600_000;
const MOST_LINES = 50;

export function drawTiles(store) {
  const names = grouped(store.devices.values(), (device) => device.device_name);
  const tiles = [...names].sort(([one], [other]) => order(one, other)).map(([name, devices]) => {
    const kind = store.slots.get(devices[0].slot)?.kind;
    const sum = (member) => devices.reduce((total, device) => total + Number(device[member]), 0);
    return [`${amount(sum("free"), kind)}`, `of ${amount(sum("capacity"), kind)} ${name} free`, ""];
  });
  const alive = [...store.kernels.values()].filter((kernel) => !isEnded(kernel)).length;
  const wrong = store.conditions().length;
  const refused = recent(store).length;
  fill(byId("tiles"), [
    ...tiles,
    [String(alive), alive === 1 ? "kernel" : "kernels", ""],
    [String(wrong), wrong === 1 ? "warning" : "warnings", wrong ? "bad" : "good"],
    [String(refused), "refused in the last hour", refused ? "warn" : "good"],
  ].map(([number, words, cls]) => h("li", { cls }, h("strong", {}, number), ` ${words}`)));
}

let drawn = -1;

export function drawAgents(store, colourOf) {
  if (drawn === store.version) return;
  drawn = store.version;
  fill(byId("agents"), store.agents.map((agent) => {
    const slots = Object.entries(agent.slots).map(([name, use]) => {
      const kind = store.slots.get(name)?.kind;
      const capacity = Number(use.capacity);
      const part = capacity ? Number(use.allocated) / capacity : 0;
      const words = `${amount(use.free, kind)} of ${amount(use.capacity, kind)} free`;
      const bar = h("meter", { min: 0, max: 1, value: Math.min(1, part), aria: { label: `${name} of ${agent.agent_id} used` } });
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, bar), h("td", {}, words));
    });
    const limits = Object.entries(agent.limits).map(([name, limit]) =>
      h("p", { cls: "limit" }, `at most ${amount(limit.limit)} of ${name}; holds ${amount(limit.held)}`));
    return h("section", { cls: "agent" },
      h("h3", {}, h("span", { cls: "swatch", data: { colour: colourOf(agent.agent_id) } }), agent.agent_id),
      h("table", {}, h("tbody", {}, ...slots)), ...limits);
  }));
}

export function drawWarnings(store) {
  const all = store.conditions();
  const lines = all.slice(0, MOST_LINES).map(({ about, reason, remedy, since }) =>
    h("li", { cls: "bad" },
      h("strong", {}, about.replaceAll("/", " ")), since ? ` for ${age(since)}` : "",
      h("p", {}, reason), remedy ? h("p", { cls: "who" }, remedy) : null));
  if (all.length > MOST_LINES) lines.push(h("li", { cls: "bad" }, `${all.length - MOST_LINES} more`));
  fill(byId("warnings"), lines.length ? lines : [h("li", { cls: "good" }, "No warnings.")]);
}

export function drawRefusals(store) {
  const groups = new Map();
  for (const refusal of recent(store)) {
    const key = JSON.stringify([refusal.code, refusal.agent_id, refusal.detail]);
    const group = groups.get(key) ?? { times: 0, first: refusal };
    groups.delete(key); // the latest come last
    groups.set(key, { ...group, times: group.times + 1, last: refusal });
  }
  const lines = [...groups.values()].reverse().slice(0, MOST_LINES).map(({ times, last }) =>
    h("li", {},
      h("strong", {}, last.code), times > 1 ? ` ${times} times, last ` : " ", `${age(last.at)} ago, ${last.agent_id}`,
      h("p", {}, last.detail),
      h("p", { cls: "who" }, [last.kernel_id && `kernel ${last.kernel_id}`, last.claim_id && `claim ${last.claim_id}`, `asked by ${last.caller}`].filter(Boolean).join(", "))));
  fill(byId("refusals"), lines.length ? lines : [h("li", { cls: "good" }, "Nobody was refused.")]);
}

export function drawHead(store) {
  const { id, version, runtime } = store.node;
  document.title = `${id} – agentd`;
  byId("node").textContent = id;
  byId("facts").textContent = `agentd ${version} · runtime ${runtime.name} · you are ${store.caller.name} (${store.caller.role})`;
}

function recent(store) {
  const since = Date.now() - HOUR_MS;
  return store.refusals.filter((refusal) => Date.parse(refusal.at) >= since);
}
