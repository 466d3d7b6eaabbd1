// Shows the request that the address names: its account, or its progress while it is open.

import { account } from "./account.js";
import { copyOnClick } from "./copy.js";
import { progressOf, promptShare } from "./open.js";
import { showMain, start } from "./page.js";
import { byId, count, duration, element, facts, indented, RETRY_MS, setStatus, showLost, showProblem, words } from "./show.js";
import { Refused, request } from "./sse.js";

const EVERY_MS = 1000; // while it is open
const MOST_GAPS = 5; // attempts between the end of the request and the writing of its account
const path = location.pathname.split("/").at(-1); // still encoded
const id = decoded(path);
let json = "";
let wasOpen = false;
let gaps = 0;

// Returns an encoded part of an address as text: as it is if its escapes are wrong, so that the server can refuse it.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function load() {
  try {
    json = await (await request(`debug/requests/${path}`, { headers: { accept: "application/json" } })).text();
  } catch (error) {
    if (error.needsKey) return;
    if (!(error instanceof Refused)) {
      showLost();
      setTimeout(load, RETRY_MS);
      return;
    }
    if (wasOpen && gaps++ < MOST_GAPS) return setTimeout(load, EVERY_MS);
    setStatus("live", "Connected");
    showMain();
    byId("account").replaceChildren(missing(error));
    return;
  }
  const entry = JSON.parse(json);
  showMain();
  showProblem("");
  setStatus("live", "Connected");
  byId("copy-json").disabled = false;
  byId("subtitle").textContent = subtitle(entry);
  wasOpen = entry.outcome === undefined;
  byId("account").replaceChildren(...(wasOpen ? soFar(entry) : account(entry)));
  if (wasOpen) setTimeout(load, EVERY_MS);
}

function subtitle({ received_unix_ns: receivedNs, route, model, client, replica }) {
  const when = new Date(receivedNs / 1e6).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
  return [when, route, model, ...(client ? [`key “${client}”`] : []), ...(replica ? [`replica ${replica}`] : [])].join(" · ");
}

function missing({ message, lacksRight }) {
  const advice = lacksRight ? [] : [element("p", {}, "It may be on another server or replica, or in the log under the same ID.")];
  return element("div", { class: "card" }, element("p", {}, message), ...advice);
}

// Returns the phase and the progress of an open request.
function soFar(entry) {
  const { phase, phases, elapsed_ns: elapsed, prompt_tokens: prompt, cached_tokens: cached } = entry;
  const bar = element("progress", { max: "1", value: String(promptShare(entry)), "aria-label": "Prompt" });
  const pairs = [
    ["Elapsed", duration(elapsed / 1e9)],
    ["Prompt", prompt ? `${count(prompt)} tokens, ${count(cached)} of them from the cache` : "not tokenized yet"],
    ...phases.map(({ name, duration_ns: ns }) => [words(name), duration(ns / 1e9)]),
  ];
  return [
    element("div", { class: "card open" },
      element("p", {}, element("strong", {}, phase === "queue" ? "Waiting" : "Running"), ` · ${phase === "prefill" ? "prompt tokens: " : ""}${progressOf(entry)}`),
      ...(phase === "prefill" ? [bar] : []),
        facts(pairs),
    ),
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
start(load);
