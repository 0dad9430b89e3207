// The page: reads the node, follows what happens there, and draws what has changed.

import { follow, Refused, token } from "./api.js";
import { Details } from "./details.js";
import { byId, inFrames } from "./dom.js";
import { login } from "./login.js";
import { DeviceMap } from "./map.js";
import { drawAgents, drawHead, drawRefusals, drawTiles, drawWarnings } from "./side.js";
import { STATS_MS, Store } from "./store.js";
import { KernelTable } from "./table.js";

const SETTLE_MS = 300;
const RETRY_MS = 2000;
const store = new Store();
const details = new Details(store);
const map = new DeviceMap(store, {
  opened: (key) => details.openDevice(key),
  pointed: (kernels) => table.light(kernels),
});
const table = new KernelTable(store, {
  opened: (id) => details.openKernel(id),
  pointed: (id) => map.light(id),
});

const draw = inFrames(
  () => {
    drawHead(store);
    drawTiles(store);
    drawWarnings(store);
    drawRefusals(store);
  },
  () => drawAgents(store, (agent) => map.colourOf(agent)),
  () => map.draw(),
  () => table.draw(),
  () => details.draw(),
);

const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

/** Look again a moment after the first of many events, one at a time, until it succeeds. */
function soon(load, isRetried) {
  let isWanted = false;
  let isLoading = false;
  const run = async () => {
    isLoading = true;
    while (isWanted) {
      await pause(SETTLE_MS);
      isWanted = false;
      try {
        await load();
        draw();
      } catch (error) {
        console.info("agentd: not looked at", error);
        isWanted = isWanted || isRetried;
        await pause(RETRY_MS);
      }
    }
    isLoading = false;
  };
  return () => {
    isWanted = true;
    if (!isLoading) run();
  };
}

const again = { free: soon(() => store.loadFree(), true), node: soon(() => store.loadNode(), true) };
const stats = soon(() => store.loadStats(), false);

function shows(isLive) {
  document.body.dataset.live = isLive ? "yes" : "no";
  byId("live").textContent = isLive ? "live" : "no connection; trying again";
}

token.arrive();
setInterval(() => {
  if (!document.hidden && document.body.dataset.live === "yes") stats();
}, STATS_MS);
setInterval(() => store.node && draw(), 30_000); // ages
document.addEventListener("visibilitychange", () => document.hidden || stats());
let wasAsked = Boolean(sessionStorage.getItem("agentd-token"));
follow({
  async onBegin() {
    await store.load();
    byId("login").hidden = true;
    byId("main").hidden = false;
    draw();
    stats();
  },
  onEvent(event) {
    again[store.take(event)]?.();
    draw();
  },
  onConnection: shows,
  async onDenied(error) {
    token.forget();
    shows(false);
    byId("details").close();
    const problem = error instanceof Refused && wasAsked ? "That token is not known here." : "";
    wasAsked = true;
    await login(problem);
  },
});
