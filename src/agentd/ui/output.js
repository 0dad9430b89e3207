// What a kernel prints, as it comes.

import { open, Refused } from "./api.js";

const MOST = 256 * 1024;
const TAIL = 500;
const PAUSE_MS = 1000;

/** Show a kernel's output from its last lines on; after a drop from its last lines again. */
export async function follow(id, place, isOver, signal) {
  const text = new Text(place);
  for (let isLost = false; ; ) {
    try {
      const answer = await open(path(id), { signal });
      isLost = false;
      await copy(answer, text);
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

async function copy(answer, text) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
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

  constructor(place) {
    this.#place = place;
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
    const place = this.#place;
    const isAtEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
    if (this.#pending) place.append(this.#pending);
    this.#pending = "";
    let shown = place.textContent.length;
    while (shown > MOST && place.childNodes.length > 1) {
      shown -= place.firstChild.length;
      place.firstChild.remove();
    }
    if (isAtEnd) place.scrollTop = place.scrollHeight;
  }
}
