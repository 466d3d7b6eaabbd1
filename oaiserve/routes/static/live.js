// Runs the live page: its feed, which it reads only while the page is visible.

import { Charts } from "./charts.js";
import { showCosts } from "./costs.js";
import { offerKeys } from "./keys.js";
import { showOpen } from "./open.js";
import { showMain, start } from "./page.js";
import { byId, element, setStatus, showProblem } from "./show.js";
import { events, Refused, request, ROOT } from "./sse.js";
import { Waterfall } from "./waterfall.js";
import { Window } from "./window.js";

const RETRY_MS = 2000;
const charts = new Charts(byId("tiles"), byId("charts"));
const waterfall = new Waterfall();
let reading = null; // the AbortController of the open feed

// Learns of the models, and returns the feed of the one to watch; null if it is not loaded.
async function openFeed(signal) {
  const { data } = await (await request("v1/models", { signal })).json();
  showMain();
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
      document.title = `Live · ${message.model} · oaiserve`;
      points = new Window(message.boundaries_seconds);
    }
    if (points.add(message.samples)) charts.show(points);
    showOpen(message.open);
    showCosts(message.costs);
    waterfall.show(message.requests);
    setStatus("live", "Connected");
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
    if (error.lacksRight) return setStatus("waiting", "This key may not watch");
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

if (location.hash === "#chat") location.replace(ROOT); // where earlier versions had it
start(
  () => {
    stopReading();
    follow();
  },
  () => {
    stopReading();
    byId("detail").close();
  },
);
