// Requests to the server, with the API key if there is one; and server-sent events over fetch, since an EventSource
// cannot send a key.

const KEY = "oaiserve-api-key";
// Where the server's routes begin: behind a proxy that may be some way down.
const ROOT = new URL("../../", import.meta.url);

// What the server said instead of an answer.
export class Refused extends Error {
  constructor(message, response) {
    super(message);
    this.needsKey = response.status === 401;
    this.retryAfterSeconds = Number(response.headers.get("retry-after"));
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

// `path` is relative, as in "v1/models". Rejects with Refused, and with fetch's errors. Where a key is missing or
// wrong the document hears of it as `needs-key`, too, whoever has asked.
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(new URL(path, ROOT), { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const refused = new Refused(body.error?.message ?? `The server answered with status ${response.status}.`, response);
  if (refused.needsKey) document.dispatchEvent(new CustomEvent("needs-key", { detail: refused.message }));
  throw refused;
}

// The events of a response, as {event, data}; data is text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const parsed = { event: "message", data: "" };
      for (const line of block.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon > 0) parsed[line.slice(0, colon)] = line.slice(colon + 2);
      }
      yield parsed;
    }
  }
}
