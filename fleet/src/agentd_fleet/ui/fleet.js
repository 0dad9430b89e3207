// The fleet as a map: every node with what is free on it, one click from its own page.

import { get, Refused, token } from "./node/api.js";
import { byId, fill, h } from "./node/dom.js";
import { age, amount } from "./node/format.js";
import { login } from "./node/login.js";
import { natural, order } from "./node/store.js";

const PAUSE_MS = 3000;
let seen = null;

function tiles({ stats, nodes, kinds }) {
  const slots = Object.entries(stats.slots).sort(([one], [other]) => order(one, other));
  const ready = nodes.filter((node) => node.state === "ready").length;
  const cls = nodes.every((node) => node.state === "ready" && !node.reason) ? "good" : "bad";
  fill(byId("tiles"), [
    h("li", { cls }, h("strong", {}, String(ready)), ` of ${nodes.length} nodes ready`),
    ...slots.map(([name, use]) => h("li", {},
      h("strong", {}, amount(use.free, kinds.get(name))), ` of ${amount(use.capacity, kinds.get(name))} ${name} free`)),
  ]);
}

const stateOf = (node) => node.state + (node.cordon ? ", cordoned" : "");
const isUsable = (node) => node.state === "ready" && !node.cordon && !node.reason;

function card(node, { stats, kinds }) {
  const uses = stats.nodes?.[node.id] ?? {};
  const rows = Object.entries(uses).filter(([, use]) => Number(use.capacity)).sort(([one], [other]) => order(one, other)).map(([name, use]) => {
    const value = Math.min(1, Number(use.allocated) / Number(use.capacity));
    return h("tr", {},
      h("th", { scope: "row" }, name),
      h("td", {}, h("meter", { min: 0, max: 1, value, aria: { label: `${name} of ${node.id} used` } })),
      h("td", {}, `${amount(use.free, kinds.get(name))} of ${amount(use.capacity, kinds.get(name))} free`));
  });
  const labels = Object.entries(node.labels).map(([name, value]) => `${name}=${value}`);
  const link = h("a", { href: `node/?node=${encodeURIComponent(node.id)}` }, node.id);
  const seenAt = node.state === "ready" ? "" : `, last seen ${age(node.seen_at)} ago`;
  return h("li", { cls: "node", data: { state: node.state } },
    h("h3", {}, link, h("span", { cls: "state" }, stateOf(node) + seenAt)),
    node.cordon ? h("p", { cls: "why" }, `cordoned by ${node.cordon.by} ${age(node.cordon.since)} ago: ${node.cordon.reason || "no reason given"}`) : null,
    node.reason ? h("p", { cls: "why" }, node.reason) : null,
    h("table", {}, h("tbody", {}, ...rows)),
    labels.length ? h("p", { cls: "labels" }, labels.join(" · ")) : null);
}

function draw() {
  if (!seen) return;
  tiles(seen);
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (node) => JSON.stringify([node.id, stateOf(node), node.labels, Object.keys(node.agents)]).toLowerCase();
  const found = seen.nodes.filter((node) => words.every((word) => text(node).includes(word)));
  const wrongFirst = (node) => (isUsable(node) ? 1 : 0);
  found.sort((one, other) => wrongFirst(one) - wrongFirst(other) || natural(one.id, other.id));
  fill(byId("nodes"), found.map((node) => card(node, seen)));
  byId("shown").textContent = `${found.length} of ${seen.nodes.length}`;
  byId("facts").textContent = `you are ${seen.caller.name} (${seen.caller.role})`;
}

async function look() {
  const [caller, nodes, stats, types] = await Promise.all([
    get("/v1/whoami"), get("/v1/nodes"), get("/v1/stats"), get("/v1/slot-types"),
  ]);
  seen = { caller, nodes, stats, kinds: new Map(types.map((type) => [type.name, type.kind])) };
}

token.arrive();
byId("find").addEventListener("input", draw);
for (let wasAsked = false; ; ) {
  try {
    await look();
    byId("login").hidden = true;
    byId("main").hidden = false;
    document.body.dataset.live = "yes";
    byId("live").textContent = "live";
    draw();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      token.forget();
      await login(wasAsked ? "That token is not known here." : "");
      wasAsked = true;
      continue;
    }
    document.body.dataset.live = "no";
    byId("live").textContent = "no connection; trying again";
  }
  await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
}
