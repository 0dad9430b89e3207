// One kernel, or one device: all that is known of it, its output as it comes, and what can be done.

import { open, Refused } from "./api.js";
import { draw } from "./chart.js";
import { byId, fill, h } from "./dom.js";
import { age, amount, bytes, cores, percent } from "./format.js";
import { describe } from "./map.js";
import { follow } from "./output.js";
import { isEnded } from "./store.js";

export class Details {
  constructor(store) {
    this.store = store;
    this.dialog = byId("details");
    this.shows = null;
    this.stop = null;
    this.dialog.addEventListener("close", () => this.#closed());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
  }

  openDevice(key) {
    const device = this.store.devices.get(key);
    this.#open({ device: key }, `${device.device_name} ${device.id}`,
      h("ul", { cls: "facts" }), this.#actions([]));
  }

  openKernel(id) {
    const curves = h("div", { cls: "curves" }, ...["cpu", "memory", "load"].map((figure) =>
      h("figure", { cls: figure }, h("figcaption", {}), h("canvas", { aria: { hidden: "true" } }))));
    const output = h("pre", { cls: "output", role: "region", tabIndex: 0, aria: { label: `output of ${id}` } });
    const log = this.store.may("kernels") ? output : h("p", {}, "Role read does not see what kernels print.");
    this.#open({ kernel: id }, id, h("dl", { cls: "facts" }), curves, this.#actions([]), h("h3", {}, "Output"), log);
    const isOver = () => isEnded(this.store.kernels.get(id) ?? { state: "terminated" });
    if (log === output) follow(id, output, isOver, this.stop.signal);
  }

  /** Show what has changed. */
  draw() {
    if (this.shows?.kernel) this.#drawKernel(this.shows.kernel);
    if (this.shows?.device) this.#drawDevice(this.shows.device);
  }

  #open(shows, title, ...content) {
    this.stop?.abort();
    this.stop = new AbortController();
    this.shows = shows;
    const close = h("button", { type: "button", cls: "close", on: { click: () => this.dialog.close() } }, "Close");
    this.dialog.replaceChildren(h("div", { cls: "title" }, h("h2", { id: "details-title" }, title), close), ...content);
    if (!this.dialog.open) this.dialog.showModal();
    this.draw();
  }

  #closed() {
    this.stop?.abort();
    this.shows = null;
    this.dialog.replaceChildren();
  }

  #drawDevice(key) {
    const device = this.store.devices.get(key);
    const list = this.dialog.querySelector("ul.facts");
    if (!device) {
      fill(list, [h("li", {}, "It is gone.")]);
      this.#setActions([]);
      return;
    }
    fill(list, [...describe(device, this.store), `also known as ${device.stable_id}`].map((line) => h("li", {}, line)));
    const path = `/v1/devices/${encodeURIComponent(device.device_name)}/${encodeURIComponent(device.id)}`;
    const isDrained = device.state === "drained";
    const word = isDrained ? "undrain" : "drain";
    const title = isDrained ? "Give it out again" : "Drain: give it to no other kernel";
    const claims = device.holders.filter((holder) => this.store.claims.has(holder.claim_id));
    const release = ({ claim_id: id }) =>
      [`Release claim ${id}`, "DELETE", `/v1/claims/${encodeURIComponent(id)}`, undefined, true];
    this.#setActions([
      ...(this.store.may("node") ? [[title, "POST", `${path}/${word}`, undefined, false]] : []),
      ...(this.store.may("kernels") ? claims.map(release) : []),
    ]);
  }

  #drawKernel(id) {
    const kernel = this.store.kernels.get(id);
    const list = this.dialog.querySelector("dl.facts");
    if (!kernel) {
      fill(list, [h("dt", {}, "State"), h("dd", {}, "removed")]);
      this.#setActions([]);
      return;
    }
    fill(list, facts(kernel).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
    const figures = this.store.figures.get(id);
    const last = figures?.last;
    const limit = last?.memory_limit_bytes;
    const charts = {
      cpu: ["CPU", cores(figures?.cpu.at(-1)), "cores", Number(kernel.slots.cpu ?? 1)],
      memory: ["Memory", bytes(figures?.memory.at(-1)), limit ? `of ${bytes(limit)}` : "", limit],
      load: ["Device load", percent(figures?.load.at(-1)), "", 1],
    };
    for (const [figure, [title, value, unit, minimumTop]] of Object.entries(charts)) {
      const figureElement = this.dialog.querySelector(`figure.${figure}`);
      figureElement.firstChild.textContent = `${title}: ${value} ${unit}`;
      draw(figureElement.lastChild, figures?.[figure] ?? [], minimumTop);
    }
    const path = `/v1/kernels/${encodeURIComponent(id)}`;
    const actions = [];
    if (this.store.may("kernels")) {
      if (!isEnded(kernel)) actions.push(["Stop", "POST", `${path}/stop`, {}, true]);
      actions.push(["Delete", "DELETE", path, undefined, true]);
    }
    this.#setActions(actions);
  }

  #actions() {
    return h("div", { cls: "actions" }, h("div", { cls: "buttons" }), h("p", { role: "alert" }));
  }

  #setActions(actions) {
    const buttons = this.dialog.querySelector(".buttons");
    const key = JSON.stringify(actions);
    if (!buttons || buttons.shows === key) return;
    buttons.shows = key;
    buttons.replaceChildren(...actions.map(([title, method, path, body, needsTwo]) => {
      const act = async () => {
        if (needsTwo && !button.dataset.sure) {
          button.dataset.sure = "yes";
          button.textContent = `Really ${title.toLowerCase()}?`;
          return;
        }
        button.disabled = true;
        await this.#carryOut(method, path, body);
        button.disabled = false;
        delete button.dataset.sure;
        button.textContent = title;
      };
      const button = h("button", { type: "button", cls: needsTwo ? "grave" : "", on: { click: act } }, title);
      return button;
    }));
  }

  async #carryOut(method, path, body) {
    const problem = this.dialog.querySelector("[role=alert]");
    problem.textContent = "";
    try {
      await open(path, { method, body });
    } catch (error) {
      problem.textContent = error instanceof Refused ? `${error.code}: ${error.message}` : String(error);
    }
  }
}

function facts(kernel) {
  const holdings = Object.entries(kernel.allocation).map(([name, slots]) => {
    const amounts = Object.entries(slots).flatMap(([slot, ids]) =>
      Object.entries(ids).map(([id, text]) => `${id} (${amount(text, slot === "mem" ? "bytes" : "")})`));
    return `${name}: ${amounts.join(", ")}`;
  });
  const ports = kernel.ports.map((port) => `${port.address}:${port.host ?? "?"} → ${port.container}/${port.protocol}`);
  const labels = Object.entries(kernel.labels).map(([name, value]) => `${name}=${value}`);
  return [
    ["State", kernel.reason ? `${kernel.state}: ${kernel.reason}` : kernel.state],
    ["Agent", kernel.agent_id],
    ["Created", `${age(kernel.created_at)} ago by ${kernel.created_by || "?"}`],
    ["Command", [kernel.image, kernel.command.join(" ")].filter(Boolean).join(": ") || "–"],
    ["Holds", holdings.join("; ") || "nothing"],
    ...(kernel.exit_code === null ? [] : [["Exit code", `${kernel.exit_code}${kernel.oom_killed ? ", out of memory" : ""}`]]),
    ...(kernel.degraded.length ? [["Degraded", kernel.degraded.join("; ")]] : []),
    ...(kernel.not_enforced.length ? [["Not enforced", kernel.not_enforced.join(", ")]] : []),
    ...(ports.length ? [["Ports", ports.join(", ")]] : []),
    ...(labels.length ? [["Labels", labels.join(", ")]] : []),
  ];
}
