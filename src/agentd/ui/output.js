// What a kernel prints, as it comes.

import { open, Refused } from "./api.js";

const MOST = 256 * 1024;
const TAIL = 500;
const PAUSE_MS = 1000;

/** Show a kernel's output from its last lines on; after a drop from its last lines again. */
export async function follow(id, element, isOver, signal) {
  const text = new Text(element);
  for (let isLost = false; ; ) {
    try {
      const response = await open(path(id), { signal });
      isLost = false;
      await copy(response, text);
      if (isOver()) {
        if (!text.length) text.add("It has printed nothing.");
        return;
      }
    } catch (error) {
      if (signal.aborted) return;
      const isFinal = isOver() || (error instanceof Refused && [401, 403].includes(error.status));
      if (!isLost) text.add(`\n[cannot be read${isFinal ? "" : ", trying again"}: ${error.message}]`);
      if (isFinal) return;
      isLost = true;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    if (signal.aborted) return;
  }
}

const path = (id) => `/v1/kernels/${encodeURIComponent(id)}/logs?follow=true&tail=${TAIL}`;

async function copy(response, text) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  text.clear();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text.add(value);
  }
}

/** The end of a text, drawn once a frame however often it grows; it stays at its end unless one reads further up. */
class Text {
  #place;
  #pending = "";
  length = 0;

  constructor(element) {
    this.#place = element;
  }

  clear() {
    this.#place.replaceChildren();
    this.#pending = "";
    this.length = 0;
  }

  add(text) {
    if (!this.#pending) requestAnimationFrame(() => this.#draw());
    this.#pending = (this.#pending + text).slice(-MOST);
    this.length += text.length;
  }

  #draw() {
    const element = this.#place;
    const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 8;
    if (this.#pending) element.append(this.#pending);
    this.#pending = "";
    let length = element.textContent.length;
    while (length > MOST && element.childNodes.length > 1) {
      length -= element.firstChild.length;
      element.firstChild.remove();
    }
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  }
}
