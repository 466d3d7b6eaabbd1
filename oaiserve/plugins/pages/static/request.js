// Shows the request that the address names: its account, or its progress while it is open.

import { account, waterfall } from "./account.js";
import { copyOnClick } from "./copy.js";
import { progressOf, promptShare, sentencesOf } from "./open.js";
import { keepLoading } from "./page.js";
import { byId, count, duration, element, facts, indented, words } from "./show.js";
import { textOrRefusal } from "./sse.js";

const EVERY_MS = 1000; // while it is open
const path = location.pathname.split("/").at(-1); // still encoded
const id = decoded(path);
let json = "";
let wasOpen = false;

// Returns an encoded part of an address as text: as it is if its escapes are wrong, so that the server can refuse it.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// Returns the id of the request. Until the page has loaded it, that may be the id of a trace in the address.
export function requestId() {
  return json ? JSON.parse(json).request_id : id;
}

// Shows the request, or why there is none. Returns when to load it again, if it is open.
function show({ json: found, refusal }) {
  if (refusal) return byId("account").replaceChildren(missing(refusal));
  if (!wasOpen && found === json) return null; // the page has become visible again
  json = found;
  const entry = JSON.parse(json);
  byId("copy-json").disabled = false;
  byId("subtitle").textContent = subtitle(entry);
  wasOpen = entry.outcome === undefined;
  byId("account").replaceChildren(...(wasOpen ? soFar(entry) : account(entry)));
  return wasOpen ? EVERY_MS : null;
}

function subtitle({ received_unix_ns: receivedNs, route, model, client, replica }) {
  const when = new Date(receivedNs / 1e6).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
  return [when, route, model, ...(client ? [`key “${client}”`] : []), ...(replica ? [`replica ${replica}`] : [])].join(" · ");
}

function missing({ message, lacksRight }) {
  const advice = lacksRight ? [] : [element("p", {}, "It may be on another server or replica, or in the log under the same ID.")];
  return element("div", { class: "card" }, element("p", {}, message), ...advice);
}

// Returns the phase and the progress of an open request.
function soFar(entry) {
  const { phase, elapsed_ns: elapsed, prompt_tokens: prompt, cached_tokens: cached } = entry;
  const bar = element("progress", { max: "1", value: String(promptShare(entry)), "aria-label": "Prompt" });
  const pairs = [
    ["Elapsed", duration(elapsed / 1e9)],
    ["Prompt", prompt ? `${count(prompt)} tokens, ${count(cached)} of them from the cache` : "not tokenized yet"],
  ];
  const phases = entry.phases.map((one) => ({ ...one, share: one.duration_ns / Math.max(1, elapsed) }));
  return [
    element("div", { class: "card open" },
      element("p", {}, element("strong", {}, phase === "queue" ? "Waiting" : "Running"), ` · ${phase === "prefill" ? "prompt tokens: " : ""}${progressOf(entry)}`),
      ...(phase === "prefill" ? [bar] : []),
      ...sentencesOf(entry).map((sentence) => element("p", {}, sentence)),
      facts(pairs),
    ),
    element("h2", {}, "Where the time went so far"),
    waterfall({ ...entry, phases, duration_ns: elapsed }),
  ];
}

function offerCopy(button, text) {
  const label = button.textContent;
  const show = (result) => {
    button.textContent = result ?? label;
    byId("said").textContent = result ?? "";
  };
  copyOnClick(button, text, show);
}

byId("title").textContent = id;
document.title = `${id} · oaiserve`;
offerCopy(byId("copy-id"), () => id);
offerCopy(byId("copy-json"), () => indented(json));
keepLoading(() => textOrRefusal(`debug/requests/${path}`), show);
