// Calls of the node that serves this page, and what happens there, as it happens.

/** At a gateway this is the page of one node, which is asked through it. */
const NODE = location.pathname.includes("/ui/node/") ? new URLSearchParams(location.search).get("node") : null;
const nodePath = (path) => (NODE === null ? path : path.replace(/^\/v1\//, `/v1/nodes/${encodeURIComponent(NODE)}/`));
const KEY = "agentd-token";
const SILENCE_MS = 40_000;
const PATIENCE_MS = 15_000;
const PAUSES_MS = [250, 500, 1000, 2000, 5000];

/** A call that was refused; `content` is the problem (RFC 9457). */
export class Refused extends Error {
  constructor(status, content) {
    super(content.detail ?? content.title ?? `status ${status}`);
    this.status = status;
    this.code = content.code ?? "";
  }
}

export const token = {
  /** Take the token that the address brings, now or when another one is pasted; it does not stay there. */
  arrive() {
    const text = new URLSearchParams(location.hash.slice(1)).get("token");
    if (text) {
      sessionStorage.setItem(KEY, text);
      history.replaceState(null, "", location.pathname + location.search);
    }
    window.addEventListener("hashchange", () => {
      if (location.hash.startsWith("#token=")) location.reload();
    });
  },
  keep: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function open(path, { method = "GET", headers = {}, body, signal } = {}) {
  const text = sessionStorage.getItem(KEY);
  const allHeaders = text ? { ...headers, Authorization: `Bearer ${text}` } : { ...headers };
  if (body !== undefined) allHeaders["Content-Type"] = "application/json";
  const response = await fetch(nodePath(path), {
    method,
    headers: allHeaders,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
  });
  if (response.ok) return response;
  throw new Refused(response.status, await response.json().catch(() => ({})));
}

export async function get(path) {
  return (await open(path, { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
}

/** Get all pages of a list; only the query of `Link` counts, so that it leads nowhere else. */
export async function list(path) {
  const rows = [];
  for (let query = "", next; query !== null; query = next) {
    const response = await open(path + query, { signal: AbortSignal.timeout(PATIENCE_MS) });
    rows.push(...(await response.json()));
    next = /<[^<>?]*(\?[^<>#]+)>; *rel="next"/.exec(response.headers.get("Link") ?? "")?.[1] ?? null;
    if (next === query) throw new Error(`the page after ${path}${query} is the same page again`);
  }
  return rows;
}

/** Yield the server-sent events of a response; `onData` is called at every sign of life. */
export async function* events(response, onData) {
  let unread = "";
  let event = {};
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onData();
    const lines = (unread + value).split("\n");
    unread = lines.pop();
    for (const line of lines) {
      const colon = line.indexOf(":");
      if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
      else if (line === "" && event.event) {
        yield { kind: event.event, id: event.id, content: JSON.parse(event.data) };
        event = {};
      }
    }
  }
}

/**
 * Follow the events for ever: `onBegin` is awaited before the first event, whenever earlier ones
 * were missed; `onEvent` gets each event; `onConnection` whether there is a connection.
 */
export async function follow({ onBegin, onEvent, onConnection, onDenied }) {
  let lastId = null;
  for (let failures = 0; ; failures += 1) {
    const stop = new AbortController();
    let timer = null;
    const onData = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
    };
    try {
      onData();
      const headers = lastId ? { "Last-Event-ID": lastId } : {};
      const response = await open("/v1/events", { headers, signal: stop.signal });
      if (lastId === null) await onBegin();
      failures = 0;
      onConnection(true);
      for await (const event of events(response, onData)) {
        if (event.kind === "reset") {
          await onBegin();
          lastId = event.id ?? null;
        } else {
          lastId = event.id;
          onEvent(event);
        }
      }
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        await onDenied(error);
        lastId = null;
        continue;
      }
      console.info("agentd: connection lost", error);
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
    onConnection(false);
    const pause = PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
