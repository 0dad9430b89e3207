// What a terminal would show of a text: the last frame of a line, no escape sequences.

const SEQUENCES = [
  "\\x1b\\[[0-?]*[ -/]*[@-~]", // CSI: colours, cursor
  "\\x1b[\\]P^_X][^\\x07\\x1b]*(?:\\x07|\\x1b\\\\)", // OSC, DCS and others: titles, links
  "\\x1b[ -/]*[0-OQ-WYZ\\\\`-~]", // of two characters and a few more
  "[\\x00-\\x07\\x0b\\x0c\\x0e-\\x1f\\x7f]", // after those that begin with an escape
];
const ESCAPES = new RegExp(SEQUENCES.join("|"), "g");
/** An escape sequence of which more is to come; a longer one is none. */
const PARTIAL = /\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|[\]P^_X][^\x07\x1b]{0,4096}\x1b?|[ -/]{0,8})$/;

/** A text that comes in parts; `line` is what is shown of the one that has no end yet. */
export class TerminalText {
  #most;
  #unread = "";
  #line = "";

  constructor(most) {
    this.#most = most;
  }

  /** Add a part, and return the lines that it ends. */
  add(part) {
    const text = this.#unread + part;
    const end = PARTIAL.exec(text)?.index ?? text.length;
    this.#unread = text.slice(end);
    const lines = (this.#line + text.slice(0, end).replace(ESCAPES, "")).split("\n");
    const last = lines.pop();
    this.#line = lastFrame(last).slice(-this.#most);
    return lines.map((line) => `${shown(line)}\n`).join("");
  }

  get line() {
    return shown(this.#line);
  }
}

/** Return what follows the last carriage return that something follows, with one at the end if there is any. */
function lastFrame(line) {
  let end = line.length;
  while (line[end - 1] === "\r") end -= 1;
  const start = end && line.lastIndexOf("\r", end - 1) + 1;
  return line.slice(start, end) + (end < line.length ? "\r" : "");
}

/** Return a line as it is shown: a backspace moves back over a character that the next one replaces. */
function shown(line) {
  const frame = lastFrame(line).replace("\r", "");
  if (!frame.includes("\b")) return frame;
  const characters = [];
  let place = 0;
  for (const character of frame) {
    if (character === "\b") place = Math.max(0, place - 1);
    else characters[place++] = character;
  }
  return characters.join("");
}
