// Calls of the node that serves this page, and what happens there, as it happens.

/** At a gateway this is the page of one node, which is asked through it. */
const NODE = location.pathname.includes("/ui/node/") ? new URLSearchParams(location.search).get("node") : null;
const at = (path) => (NODE === null ? path : path.replace(/^\/v1\//, `/v1/nodes/${encodeURIComponent(NODE)}/`));
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
  /** Take the token that the address brings, which is not to stay there. */
  arrive() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      sessionStorage.setItem(KEY, given);
      history.replaceState(null, "", location.pathname + location.search);
    }
  },
  keep: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function open(path, { method = "GET", headers = {}, body, signal } = {}) {
  const known = sessionStorage.getItem(KEY);
  const given = known ? { ...headers, Authorization: `Bearer ${known}` } : { ...headers };
  if (body !== undefined) given["Content-Type"] = "application/json";
  const answer = await fetch(at(path), {
    method,
    headers: given,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
  });
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

export async function get(path) {
  return (await open(path, { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
}

/** Get all pages of a list; only the query of `Link` counts, so that it leads nowhere else. */
export async function list(path) {
  const found = [];
  for (let query = "", next; query !== null; query = next) {
    const answer = await open(path + query, { signal: AbortSignal.timeout(PATIENCE_MS) });
    found.push(...(await answer.json()));
    next = /<[^<>?]*(\?[^<>#]+)>; *rel="next"/.exec(answer.headers.get("Link") ?? "")?.[1] ?? null;
    if (next === query) throw new Error(`the page after ${path}${query} is the same page again`);
  }
  return found;
}

/** Yield the server-sent events of an answer; `heard` is called at every sign of life. */
export async function* events(answer, heard) {
  let unread = "";
  let event = {};
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
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
 * Follow what happens for ever: `begin` is awaited before anything else is told, whenever the past
 * is not known; `told` gets each event; `changed` whether there is a connection.
 */
export async function follow({ begin, told, changed, denied }) {
  let last = null;
  for (let failures = 0; ; failures += 1) {
    const stop = new AbortController();
    let timer = null;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
    };
    try {
      heard();
      const headers = last ? { "Last-Event-ID": last } : {};
      const answer = await open("/v1/events", { headers, signal: stop.signal });
      if (last === null) await begin();
      failures = 0;
      changed(true);
      for await (const event of events(answer, heard)) {
        if (event.kind === "reset") {
          await begin();
          last = event.id ?? null;
        } else {
          last = event.id;
          told(event);
        }
      }
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        await denied(error);
        last = null;
        continue;
      }
      console.info("agentd: connection lost", error);
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
    changed(false);
    const pause = PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
