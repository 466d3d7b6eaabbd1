// Runs the page: its tabs, the form for the API key, and the feed, which it reads only while the page is visible.

import { Chat } from "./chat.js";
import { Charts } from "./charts.js";
import { showCosts } from "./costs.js";
import { offerKeys } from "./keys.js";
import { showOpen } from "./open.js";
import { byId, element, setStatus, showProblem } from "./show.js";
import { events, hasKey, keepKey, Refused, request } from "./sse.js";
import { Waterfall } from "./waterfall.js";
import { Window } from "./window.js";

const RETRY_MS = 2000;
const charts = new Charts(byId("tiles"), byId("charts"));
const waterfall = new Waterfall();
const chat = new Chat();
let reading = null; // the AbortController of the open feed

function askForKey(message) {
  stopReading();
  setStatus("waiting", "Waiting for an API key");
  showProblem(hasKey() ? `${message} Please enter another one.` : "");
  byId("detail").close();
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("key").focus();
}

// Learns of the models, and returns the feed of the one to watch; null if it is not loaded.
async function openFeed(signal) {
  const { data } = await (await request("v1/models", { signal })).json();
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  chat.offer(data);
  offerKeys();
  const processes = data.filter((model) => model.is_loaded !== undefined); // of several models, each has its own
  offer(processes);
  const watched = processes.find(({ id }) => id === byId("watched").value);
  if (watched && !watched.is_loaded) return null;
  return request(`dashboard/feed${watched ? `?model=${encodeURIComponent(watched.id)}` : ""}`, { signal });
}

// Offers the models to watch. Unless the user has chosen another one, it is the first that is loaded.
function offer(models) {
  const box = byId("watched");
  const ids = models.map(({ id }) => id);
  if (ids.join("\n") !== [...box.options].map(({ value }) => value).join("\n")) {
    box.replaceChildren(...ids.map((id) => element("option", {}, id)));
  }
  box.value = box.dataset.chosen ?? models.find((model) => model.is_loaded)?.id ?? ids[0] ?? "";
  box.parentElement.hidden = models.length === 0;
}

async function readFeed(signal) {
  const response = await openFeed(signal);
  showProblem("");
  if (response === null) return setStatus("waiting", `${byId("watched").value} is not loaded`);
  let points = null;
  for await (const { event, data } of events(response)) {
    const message = JSON.parse(data);
    if (event === "hello") {
      byId("model").textContent = `${message.model} · ${message.version}`;
      document.title = `oaiserve: ${message.model}`;
      points = new Window(message.boundaries_seconds);
    }
    if (points.add(message.samples)) charts.show(points);
    showOpen(message.open);
    showCosts(message.costs);
    waterfall.show(message.requests);
    setStatus("live", "Live");
  }
}

async function follow() {
  if (reading || document.hidden) return;
  const mine = (reading = new AbortController());
  let waitMs = RETRY_MS;
  try {
    await readFeed(mine.signal);
    if (byId("status").dataset.state === "live") setStatus("lost", "The server closed the feed; trying again");
  } catch (error) {
    if (error.name === "AbortError" || error.needsKey) return;
    if (error.lacksRight) return setStatus("waiting", "This key is without the live page");
    setStatus("lost", "No connection; trying again");
    if (error instanceof Refused) {
      showProblem(error.message);
      waitMs = Math.max(waitMs, error.retryAfterSeconds * 1000);
    }
  } finally {
    if (reading === mine) reading = null;
  }
  setTimeout(follow, waitMs);
}

function stopReading() {
  reading?.abort();
  reading = null;
}

byId("watched").addEventListener("change", ({ target }) => {
  target.dataset.chosen = target.value;
  stopReading();
  follow();
});
document.addEventListener("visibilitychange", () => (document.hidden ? stopReading() : follow()));
document.addEventListener("needs-key", (event) => askForKey(event.detail));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[!-~]+$/.test(key)) return showProblem("An API key has only ASCII letters, digits and punctuation, and no spaces.");
  keepKey(key);
  byId("key").value = "";
  stopReading();
  follow();
});

const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab) {
  for (const other of tabs) {
    const isSelected = other === tab;
    other.setAttribute("aria-selected", String(isSelected));
    other.tabIndex = isSelected ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isSelected;
  }
  history.replaceState(null, "", tab.id === "tab-chat" ? "#chat" : "#live");
}
for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    select(next);
    next.focus();
  });
}

if (location.hash === "#chat") select(byId("tab-chat"));
follow();
