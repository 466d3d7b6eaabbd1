// Lists the last requests that pass the filters in the address, and updates the list while the page is visible.

import { keepLoading } from "./page.js";
import { byId, element } from "./show.js";
import { requestJson } from "./sse.js";
import { Waterfall } from "./waterfall.js";

const EVERY_MS = 2000;
const MOST_REQUESTS = 100;
const MOST_OPEN = 20; // that a server lists
const FILTERS = ["id", "outcome", "slow", "model", "client", "route"];
const NO_KEY = "without a key"; // a choice among clients, whose names have no spaces
const waterfall = new Waterfall();
const form = byId("filters");
const box = (name) => form.elements.namedItem(name);

// The address has each filter by its name, and `failed` for all that were not served.
function readAddress() {
  const query = new URLSearchParams(location.search);
  for (const name of FILTERS) choose(name, query.get(name) ?? "");
  if (query.has("failed")) choose("outcome", "not-served");
  if (query.get("client") === "") choose("client", NO_KEY);
}

function choose(name, value) {
  if (box(name).tagName === "SELECT") offer(name, [value]);
  box(name).value = value;
}

// Adds values to those of a box.
function offer(name, values) {
  const known = new Set([...box(name).options].map(({ value }) => value));
  const texts = { slow: (value) => `${Number(value) / 1000} s or more` };
  for (const value of new Set(values)) {
    if (!known.has(value)) box(name).append(element("option", { value }, texts[name]?.(value) ?? value));
  }
}

// Returns the filters as the query of the page's address.
function filters() {
  const query = new URLSearchParams();
  for (const name of FILTERS) {
    const value = box(name).value.trim();
    if (value === "not-served") query.set("failed", "true");
    else if (value) query.set(name, value === NO_KEY ? "" : value);
  }
  return query;
}

const fetchNow = () => requestJson(`debug/requests?${[filters(), "form=row", `limit=${MOST_REQUESTS}`].filter(String).join("&")}`);

function show(found) {
  const all = [...found.open, ...found.requests];
  offer("model", all.map(({ model }) => model));
  offer("client", all.map(({ client }) => client ?? NO_KEY));
  offer("route", all.map(({ route }) => route));
  const isFiltered = filters().size > 0;
  byId("clear").hidden = !isFiltered;
  byId("no-requests").textContent = isFiltered ? "No request matches these filters." : "No requests yet. They appear here as soon as they arrive.";
  const ended = found.requests.length === MOST_REQUESTS ? `the last ${MOST_REQUESTS}` : String(found.requests.length);
  const open = found.open.length < MOST_OPEN ? String(found.open.length) : `the newest ${found.open.length}`;
  byId("number").textContent = all.length ? `${open} open, ${ended} ended` : "";
  waterfall.show(found);
  return EVERY_MS;
}

function changed() {
  const query = filters();
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  load();
}

form.addEventListener("input", changed);
form.addEventListener("reset", () => setTimeout(changed)); // once the browser has emptied the boxes
form.addEventListener("submit", (event) => event.preventDefault());
readAddress();
const load = keepLoading(fetchNow, show);
