// Sends requests to the server, with the API key if there is one, and reads server-sent events over fetch, because an
// EventSource cannot send a key.

import { session } from "./storage.js";

const KEY = "oaiserve-api-key";
// The URL of the server's root. Behind a proxy, it may have a path prefix.
export const ROOT = new URL("../../", import.meta.url);

export const clientsPage = () => new URL("clients", ROOT).href;
export const requestsOf = (client) => new URL(`requests?client=${encodeURIComponent(client)}`, ROOT).href;
export const pageOf = (requestId) => new URL(`requests/${encodeURIComponent(requestId)}`, ROOT).href;
export const runPageOf = (runId) => new URL(`runs/${encodeURIComponent(runId)}`, ROOT).href;

// The error that the server sent instead of an answer.
export class Refused extends Error {
  constructor(message, { param, code }, response) {
    super(message);
    this.param = param;
    this.code = code;
    this.needsKey = response.status === 401;
    this.lacksRight = response.status === 403;
    this.retryAfterSeconds = Number(response.headers.get("retry-after"));
  }
}

export function key() {
  return session.getItem(KEY);
}

export function hasKey() {
  return key() !== null;
}

export function keepKey(key) {
  session.setItem(KEY, key);
}

// Replaces the error of a network failure, because browsers' messages say little, and tells the document, which gets the
// event `lost`. Aborts stay as they are.
function worded(promise, message) {
  return promise.catch((error) => {
    if (error.name === "AbortError") throw error;
    document.dispatchEvent(new CustomEvent("lost"));
    throw new Error(message, { cause: error });
  });
}

// Fetches a URL of the server with the key.
export function reach(url, options) {
  const headers = { ...options.headers, ...(hasKey() ? { authorization: `Bearer ${key()}` } : {}) };
  return worded(fetch(url, { ...options, headers }), "The server cannot be reached.");
}

export const readNext = (reader) => worded(reader.read(), "The connection to the server was lost.");

// Sends a request to a relative path such as "v1/models". Throws Refused, or what `reach` throws. If the key is missing
// or wrong, the document also gets the event `needs-key`, whichever part of the page sent the request, unless it
// `isQuiet`.
export async function request(path, { isQuiet = false, ...options } = {}) {
  const response = await reach(new URL(path, ROOT), options);
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const refused = new Refused(error?.message ?? `The server answered with status ${response.status}.`, error ?? {}, response);
  if (refused.needsKey && !isQuiet) askForKey(refused);
  throw refused;
}

export function askForKey({ message }) {
  document.dispatchEvent(new CustomEvent("needs-key", { detail: message }));
}

// Sends a request, and returns the JSON of its answer, also where a browser would get a page. Throws what `request` does.
export async function requestJson(path, options = {}) {
  return (await request(path, { ...options, headers: { accept: "application/json" } })).json();
}

// Returns the JSON of an answer as text, or the server's refusal. Throws it if it asks for a key.
export async function textOrRefusal(path) {
  try {
    return { json: await (await request(path, { headers: { accept: "application/json" } })).text() };
  } catch (error) {
    if (!(error instanceof Refused) || error.needsKey) throw error;
    return { refusal: error };
  }
}

// Yields the events of a response as {event, data}, where data is text, and calls `hear` with the text of each comment.
// A block of comments alone is no event. A caller that stops reading ends the request, so the server stops, too.
export async function* events(response, hear = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    while (true) {
      const { done, value } = await readNext(reader);
      if (done) return;
      buffer += value;
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      for (const block of blocks) {
        const parsed = { event: "message" };
        for (const line of block.split("\n")) {
          const [, name, value] = line.match(/^([^:]*):? ?(.*)$/);
          if (line.startsWith(":")) hear(value);
          else parsed[name] = name === "data" && parsed.data !== undefined ? `${parsed.data}\n${value}` : value;
        }
        if (parsed.data !== undefined) yield parsed;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it may have failed already
  }
}
