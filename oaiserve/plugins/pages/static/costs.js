// Shows what requests cost: of one request as facts, and of each client since the start as a table.

import { byId, duration, element, number, numberCell, percent } from "./show.js";

const UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [0, "B"]];

export function bytes(value) {
  const [size, unit] = UNITS.find(([least]) => value >= least);
  return `${number(value / (size || 1))} ${unit}`;
}

const seconds = (ns) => duration(ns / 1e9);
const alone = (ns, hasDrafts) => {
  const name = hasDrafts ? "alone without drafts" : "alone";
  return ns === null ? `${name} not known yet` : `${name} ${duration(ns / 1e9)}`;
};
const small = (value) => (value === null ? "–" : String(Number(value.toPrecision(3))));

// Returns names and texts of what a request cost, as far as it is known. What it would have cost alone is without drafts.
export function costFacts({ machine_ns: machine, core_ns: core, alone_ns: aloneNs, alone_core_ns: aloneCoreNs, ...cost }, hasDrafts) {
  if (machine === null) return [];
  return [
    ["Engine time", `${seconds(machine)}, ${alone(aloneNs, hasDrafts)}`],
    ["Core time", `${seconds(core)}, ${alone(aloneCoreNs, hasDrafts)}`],
    ["Memory", `${bytes(cost.kv_byte_seconds)}·s of KV cache, ${bytes(cost.weight_bytes)} of weights read`],
    ...(cost.joules === null ? [] : [["Energy", `${small(cost.joules)} J`]]),
    ...(cost.price === null ? [] : [["Price", small(cost.price)]]),
  ];
}

// Shows the clients that cost most, from lists of a name, nanoseconds of the engine, of cores and alone, and a price.
export function showCosts(clients) {
  byId("costs").hidden = clients.length === 0;
  const total = clients.reduce((sum, [, machine]) => sum + machine, 0);
  const rows = clients.map(([client, machine, core, aloneNs, price]) => {
    const cells = [seconds(machine), percent(machine / Math.max(1, total)), seconds(core), seconds(aloneNs), price ? small(price) : "–"];
    return element("tr", {}, element("th", { scope: "row" }, client || "without a key"), ...cells.map((text) => numberCell(text)));
  });
  byId("cost-rows").replaceChildren(...rows);
}
