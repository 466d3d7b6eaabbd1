// Shows the replicas of a gateway, and how requests ended.

import { newTile } from "./charts.js";
import { showRows } from "./rows.js";
import { byId, element, number, percent } from "./show.js";

const TILES = [
  ["Replicas", ({ replicas }) => [`${replicas.filter(({ is_up: isUp }) => isUp).length} of ${replicas.length}`, "are up"]],
  ["Answered", ({ requests: { answered, refused, cancelled, cut_off: cut, no_replica: none } }) => [number(answered), `${number(cut + none)} failed, ${number(refused)} refused, ${number(cancelled)} cancelled`]],
  ["Streams moved", ({ continued: { alike, unlike, failed } }) => [number(alike + unlike), failed ? `to another replica; ${failed} could not` : "to another replica"]],
];
const tiles = TILES.map(newTile);

export function showFleet(fleet) {
  const shown = fleet.has_children ? tiles.slice(0, 1) : tiles; // the others are about a gateway
  if (byId("fleet").hidden) byId("tiles").prepend(...shown.map(({ tile }) => tile));
  for (const { value, more, read } of shown) [value.textContent, more.textContent] = read(fleet);
  byId("fleet").hidden = false;
  byId("no-addresses").hidden = fleet.has_children || fleet.replicas.every(({ address }) => address);
  showRows(byId("replicas"), fleet.replicas.map((replica, key) => Object.assign(row(replica), { key })));
}

// Hides the replicas, when the page changes to the feed of one model.
export function hideFleet() {
  byId("fleet").hidden = true;
  for (const { tile } of tiles) tile.remove();
}

function row(replica) {
  const { number: name, address, state, is_up: isUp, models } = replica;
  const kind = isUp ? "outcome-finished" : name === null ? "" : "outcome-failed"; // a model that isn't loaded has no number
  const where = address ? [" ", element("a", { href: `http://${address}/dashboard` }, address)] : [];
  const cells = [
    ["Models", models.join(", ") || "–"],
    ["Sent", number(replica.num_sent), "number"],
    ["Open", number(replica.num_open), "number"],
    ["Running", number(replica.num_running), "number"],
    ["Waiting", number(replica.num_waiting), "number"],
    ["KV cache", percent(replica.kv_use), "number"],
  ];
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, String(name ?? "–"), ...where),
    element("td", { "data-label": "State", class: kind }, state),
    ...cells.map(([label, text, kind]) => element("td", { "data-label": label, class: kind ?? "" }, text)),
  );
}
