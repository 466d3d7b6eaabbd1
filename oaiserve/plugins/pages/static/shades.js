// The shades of bars: what a phase took alone, what other requests added, what the machine added, and the rest.

import { element, words } from "./show.js";

const OTHERS = ["neighbour_decodes", "neighbour_prompts", "neighbour_media"];
const NAMES = { alone: "what it would have taken alone", others: "added by other requests", machine: "the machine was busy elsewhere" };

// Returns whether the server could not say yet what a phase with these causes would have taken alone.
export const isAloneUnknown = ({ alone, not_known_yet: unknown }) => alone === undefined && unknown !== undefined;

// Returns the shade of a cause.
export function shadeOf(cause) {
  if (OTHERS.includes(cause)) return "others";
  return cause in NAMES ? cause : "rest";
}

// Returns where three shades of a phase end, in nanoseconds, from its causes: what it took alone, that with its
// neighbours, and that with the machine's delays. It is empty if the phase has no causes. What is not known yet is rest.
export function partsOf(causes) {
  if (!Object.keys(causes).length) return [];
  const { alone = 0, machine = 0 } = causes;
  const shared = OTHERS.reduce((sum, name) => sum + (causes[name] ?? 0), alone);
  return [alone, shared, shared + machine];
}

export const shadeSwatch = (shade) => element("i", { class: `shade-${shade}` });

// Returns the legend of the shades. `rest` names the last one: each of its causes, where these are known. The machine of
// an engine of another kind can't be seen.
export function shadeLegend(rest, isPassed = false) {
  const names = Object.entries({ ...NAMES, ...(rest ? { rest } : {}) }).filter(([shade]) => !isPassed || shade !== "machine");
  const items = names.map(([shade, text]) => element("li", {}, shadeSwatch(shade), text));
  return element("ul", { class: "legend", "aria-label": "Shades of bars" }, ...items);
}

// Returns the legend for bars of several requests.
export function sharedLegend(isPassed = false) {
  return shadeLegend(isPassed ? "not known from outside" : "unexplained, and other causes", isPassed);
}

// Returns the causes of the last shade in these phases, the largest first.
export function restOf(phases) {
  const sums = {};
  for (const [name, ns] of phases.flatMap((causes) => Object.entries(causes))) sums[name] = (sums[name] ?? 0) + ns;
  const rest = Object.keys(sums).filter((name) => shadeOf(name) === "rest" && sums[name] > 0);
  return rest.sort((a, b) => sums[b] - sums[a]).map(words).join(", ");
}
