// Shows the request that the address names: its account, or as long as it is open, how far it is.

import { account } from "./account.js";
import { openBar, progressOf, promptShare } from "./open.js";
import { showMain, start } from "./page.js";
import { byId, count, duration, element, indented, setStatus, showProblem, words } from "./show.js";
import { request } from "./sse.js";

const EVERY_MS = 1000; // while it is open
const MOST_GAPS = 5; // looks without it, between its end and the writing of its account
const COPIED_MS = 2000;
const path = location.pathname.split("/").at(-1); // encoded, as it is needed again
const id = decodeURIComponent(path);
let json = "";
let wasOpen = false;
let gaps = 0;

async function load() {
  try {
    json = await (await request(`debug/requests/${path}`, { headers: { accept: "application/json" } })).text();
  } catch (error) {
    if (error.needsKey) return;
    if (wasOpen && gaps++ < MOST_GAPS) return setTimeout(load, EVERY_MS);
    if (error.param === undefined) setStatus("lost", "No connection");
    else setStatus("live", "Connected");
    showMain();
    byId("account").replaceChildren(...missing(error.message));
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

function missing(message) {
  return [
    element("div", { class: "card" }, element("p", {}, message), element("p", {}, "Another server, or replica, may have it. So may the log, under the same id.")),
  ];
}

// Returns an open request: its phase, how much of the prompt is done, and what it was promised.
function soFar(entry) {
  const { phase, phases, elapsed_ns: elapsed, forecast, end_now_ns: end, prompt_tokens: prompt, cached_tokens: cached } = entry;
  const bar = element("progress", { max: "1", value: String(promptShare(entry)), "aria-label": "Prompt" });
  const facts = [
    ["Elapsed", duration(elapsed / 1e9)],
    ["Prompt", prompt ? `${count(prompt)} tokens, ${count(cached)} of them from the cache` : "not tokenized yet"],
    ...(forecast.is_calibrated ? [["Forecast", `ends after ${duration(forecast.end_low_ns / 1e9)} to ${duration(forecast.end_high_ns / 1e9)}`]] : []),
    ...(end ? [["As it looks now", `ends after ${duration(end / 1e9)}`]] : []),
    ...phases.map(({ name, duration_ns: ns }) => [words(name), duration(ns / 1e9)]),
  ];
  return [
    element("div", { class: "card open" },
      element("p", {}, element("strong", {}, phase === "queue" ? "Waiting" : "Running"), ` · ${phase === "prefill" ? "prompt tokens: " : ""}${progressOf(entry)}`),
      ...(phase === "prefill" ? [bar] : []),
      ...(forecast.is_calibrated ? [openBar(entry)] : []),
      element("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
    ),
  ];
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    byId("said").textContent = "Copied";
  } catch {
    byId("said").textContent = "The browser did not allow copying";
  }
  const before = button.textContent;
  button.textContent = byId("said").textContent === "Copied" ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = before), COPIED_MS);
}

byId("title").textContent = id;
document.title = `${id} · oaiserve`;
byId("copy-id").addEventListener("click", ({ target }) => copy(target, id));
byId("copy-json").addEventListener("click", ({ target }) => copy(target, indented(json)));
start(load);
