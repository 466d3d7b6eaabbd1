// Runs the live page of a server or a gateway. It reads the feed only while the page is visible.

import { Charts } from "./charts.js";
import { showCosts } from "./costs.js";
import { hideFleet, showFleet } from "./fleet.js";
import { offerKeys } from "./keys.js";
import { showMain, start } from "./page.js";
import { byId, element, phone, RETRY_MS, setStatus, showLost, showProblem } from "./show.js";
import { askForKey, events, hasKey, Refused, request, requestJson } from "./sse.js";
import { Waterfall } from "./waterfall.js";
import { Window } from "./window.js";

const MOST_REQUESTS = 30;
const charts = new Charts(byId("tiles"), byId("charts"));
const waterfall = new Waterfall();
let reading = null; // the AbortController of the open feed
let isAsking = false; // for the requests of a fleet

// Reads the list of models, and returns the feed of the watched one, or null if it is not loaded.
async function openFeed(signal) {
  const listed = await models(signal);
  const processes = listed.filter((model) => model.is_loaded !== undefined); // each of several has its own
  offer(processes);
  const watched = processes.find(({ id }) => id === byId("watched").value);
  const shown = watched ? [watched] : listed;
  byId("live").classList.toggle("without-answers", shown.length > 0 && shown.every(({ task }) => task && task !== "generate"));
  byId("live").classList.toggle("from-outside", shown.length > 0 && shown.every(({ owned_by: owner }) => owner !== "oaiserve"));
  const isLoaded = !watched || watched.is_loaded;
  const feed = isLoaded ? await request(`dashboard/feed${watched ? `?model=${encodeURIComponent(watched.id)}` : ""}`, { signal }) : null;
  showMain();
  offerKeys();
  return feed;
}

// Returns the models, or none if the list is refused: a gateway's feed may need no key, and no replica that is up.
async function models(signal) {
  try {
    return (await requestJson("v1/models", { signal, isQuiet: true })).data;
  } catch (error) {
    if (error instanceof Refused) return [];
    throw error;
  }
}

// Offers the models to watch: all, unless the user has chosen one.
function offer(models) {
  const box = byId("watched");
  const ids = ["", ...models.map(({ id }) => id)];
  if (ids.join("\n") !== [...box.options].map(({ value }) => value).join("\n")) {
    box.replaceChildren(...ids.map((id) => element("option", { value: id }, id || "All")));
  }
  box.value = box.dataset.chosen ?? "";
  box.parentElement.hidden = models.length < 2;
}

async function readFeed(signal) {
  const response = await openFeed(signal);
  showProblem("");
  if (response === null) return setStatus("waiting", `${byId("watched").value} is not loaded`);
  let points = null;
  for await (const { event, data } of events(response)) {
    const message = JSON.parse(data);
    if (event === "hello") {
      if (message.fleet) byId("costs").hidden = true;
      else hideFleet();
      const name = message.model ?? (message.fleet.has_children ? "all models" : "gateway");
      byId("model").textContent = `${name} · ${message.version}`;
      document.title = `Live · ${name} · oaiserve`;
      points = new Window(message.boundaries_seconds);
    }
    if (points.add(message.samples)) charts.show(points);
    if (message.fleet) {
      showFleet(message.fleet);
      showRequestsOfFleet(signal);
    } else {
      showCosts(message.costs);
      waterfall.show(message);
    }
    setStatus("live", "Connected");
  }
}

// Everyone who sees a gateway's page may read its feed, but replicas may require a key for their requests.
async function showRequestsOfFleet(signal) {
  if (isAsking) return;
  isAsking = true;
  try {
    waterfall.show(await requestJson(`debug/requests?form=row&limit=${MOST_REQUESTS}`, { signal, isQuiet: true }));
    byId("needs-key").hidden = true;
  } catch (error) {
    byId("needs-key").hidden = !error.needsKey;
  } finally {
    isAsking = false;
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
    if (error.lacksRight && hasKey()) return askForKey(error);
    showLost();
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

// On a phone, requests come first, and the charts are folded.
function arrange({ matches: isPhone }) {
  const charts = byId("charts-fold");
  if (isPhone) byId("recent").after(charts);
  else byId("recent").before(charts);
  charts.open = !isPhone;
}

phone.addEventListener("change", arrange);
arrange(phone);
byId("watched").addEventListener("change", ({ target }) => {
  target.dataset.chosen = target.value;
  stopReading();
  follow();
});
byId("enter-key").addEventListener("click", () => document.dispatchEvent(new CustomEvent("needs-key")));
document.addEventListener("visibilitychange", () => (document.hidden ? stopReading() : follow()));

start(() => {
  stopReading();
  follow();
}, stopReading);
