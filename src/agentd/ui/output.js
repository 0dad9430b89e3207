// What a kernel prints, as it comes.

import { open, Refused } from "./api.js";
import { TerminalText } from "./terminal.js";

const MOST = 256 * 1024;
const TAIL = 500;
const PAUSE_MS = 1000;

/** Show a kernel's output from its last lines on; after a drop go on where it ended. */
export async function follow(id, element, isOver, signal) {
  const output = new Output(element);
  let kernel = null;
  for (;;) {
    try {
      const response = await open(path(id, output.position), { signal });
      kernel ??= response.headers.get("Log-Kernel");
      if (response.headers.get("Log-Kernel") !== kernel) {
        await response.body.cancel();
        output.say("[this kernel is gone, and another one has its id]");
        return;
      }
      await output.copy(response);
      if (isOver()) {
        if (output.isEmpty) output.say("It has printed nothing.");
        return;
      }
    } catch (error) {
      if (signal.aborted) return;
      const isFinal = isOver() || (error instanceof Refused && [401, 403].includes(error.status));
      output.say(`[cannot be read${isFinal ? "" : ", trying again"}: ${error.message}]`);
      if (isFinal) return;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    if (signal.aborted) return;
  }
}

function path(id, position) {
  const start = position === null ? `tail=${TAIL}` : `from=${position}`;
  return `/v1/kernels/${encodeURIComponent(id)}/logs?follow=true&${start}`;
}

/** The end of an output, drawn once a frame however often it grows; it stays at its end unless one reads further up. */
class Output {
  /** The position after the last byte that was read; null before the first answer. */
  position = null;
  #place;
  #decoder = new TextDecoder();
  #text = new TerminalText(MOST);
  #pending = "";
  #notice = "";
  #last = document.createTextNode("");
  #isDrawn = false;

  constructor(element) {
    this.#place = element;
    element.replaceChildren(this.#last);
  }

  get isEmpty() {
    return !this.position;
  }

  async copy(response) {
    const start = Number(response.headers.get("Log-Position"));
    if (this.position !== null && start > this.position) {
      this.#decoder = new TextDecoder();
      this.#add(`\n[${start - this.position} bytes were dropped by the node]\n`);
    }
    this.position = start;
    this.say("");
    const reader = response.body.getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.position += value.byteLength;
      this.#add(this.#decoder.decode(value, { stream: true }));
    }
  }

  /** Show a notice after the output, instead of the one before. */
  say(notice) {
    this.#notice = notice && `\n${notice}`;
    this.#drawSoon();
  }

  #add(text) {
    this.#pending = (this.#pending + this.#text.add(text)).slice(-MOST);
    this.#drawSoon();
  }

  #drawSoon() {
    if (!this.#isDrawn) requestAnimationFrame(() => this.#draw());
    this.#isDrawn = true;
  }

  #draw() {
    this.#isDrawn = false;
    const element = this.#place;
    const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 8;
    if (this.#pending) this.#last.before(this.#pending);
    this.#pending = "";
    this.#last.data = this.#text.line + this.#notice;
    let length = element.textContent.length;
    while (length > MOST && element.firstChild !== this.#last) {
      length -= element.firstChild.length;
      element.firstChild.remove();
    }
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  }
}
