// Server-sent events over fetch: an EventSource cannot send an API key.

const KEY = "oaiserve-api-key";

export class NeedsKey extends Error {}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

// Rejects with NeedsKey, or with an Error that says what the server said.
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? `The server answered with status ${response.status}.`;
  throw response.status === 401 ? new NeedsKey(message) : new Error(message);
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
