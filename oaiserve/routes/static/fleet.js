// Shows the replicas of a gateway and what became of requests, anew each second while the page is visible.

import { showMain, start } from "./page.js";
import { byId, element, number, percent, setStatus } from "./show.js";
import { request } from "./sse.js";

const EVERY_MS = 1000;
let before = null; // the last look, for rates
let isLooking = false;

function tile(name, value, more) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "more" }, more));
}

function tiles({ requests, continued, replicas }, atMs) {
  const ended = Object.values(requests).reduce((sum, count) => sum + count, 0);
  const rate = before ? (1000 * (ended - before.ended)) / (atMs - before.atMs) : null;
  before = { ended, atMs };
  const taking = replicas.filter(({ state }) => state.startsWith("takes")).length;
  const failed = requests.cut_off + requests.no_replica;
  const went = continued.alike + continued.unlike;
  return [
    tile("Replicas", `${taking} of ${replicas.length}`, "take requests"),
    tile("Requests/s", number(rate), "ended in the last second"),
    tile("Requests", number(ended), `${failed} failed, ${requests.refused} refused, ${requests.cancelled} cancelled`),
    tile("Streams that went on", number(went), `at another replica; ${continued.failed} could not`),
  ];
}

function row(replica) {
  const isWell = replica.state.startsWith("takes");
  const numbers = [replica.num_sent, replica.num_open, replica.num_running, replica.num_waiting].map(number);
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, String(replica.number)),
    element("td", { class: isWell ? "outcome-finished" : "outcome-failed" }, replica.state),
    element("td", {}, replica.models.join(", ") || "–"),
    ...[...numbers, percent(replica.kv_use)].map((text) => element("td", { class: "number" }, text)),
  );
}

async function look() {
  setTimeout(look, EVERY_MS);
  if (document.hidden || isLooking) return;
  isLooking = true;
  try {
    const fleet = await (await request("dashboard/fleet")).json();
    byId("version").textContent = fleet.version;
    byId("tiles").replaceChildren(...tiles(fleet, performance.now()));
    byId("replicas").replaceChildren(...fleet.replicas.map(row));
    showMain();
    setStatus("live", "Connected");
  } catch (error) {
    setStatus("lost", `No connection; trying again (${error.message})`);
  }
  isLooking = false;
}

start(look);
