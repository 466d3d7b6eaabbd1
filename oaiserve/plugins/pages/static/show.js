// Makes elements, bars and texts: durations, numbers, times and JSON as people read them.

export const PHASES = ["receive", "tokenize_wait", "tokenize", "encode_media", "queue", "prefill", "decode", "respond"];
// The phases of a request that a gateway passes to an engine of another kind
export const PASSED_PHASES = ["receive", "wait", "connect", "first_byte", "stream", "respond"];

// Returns the phases of which these rows may be. Each row begins with the name of its phase.
export const phasesFor = (rows) => (rows.every(([name]) => PHASES.includes(name)) ? PHASES : PASSED_PHASES);

export const RETRY_MS = 2000; // after which a page tries a lost connection again
export const phone = matchMedia("(max-width: 46rem)"); // as in the style sheets

export const byId = (id) => document.getElementById(id);

export function showProblem(problem) {
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

// Shows whether the page is live, and says it once.
export function setStatus(state, text) {
  const status = byId("status");
  if (status.dataset.state === state && status.textContent === text) return;
  status.dataset.state = state;
  status.textContent = text;
}

export function showLost() {
  setStatus("lost", "No connection; trying again");
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Returns a list of names, each with its value.
export function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

// Returns boxes, each with a name, a value, a note and perhaps a class of the value.
export function tiles(found) {
  const boxes = found.map(([name, value, note, kind]) => element("div", {}, element("dt", {}, name), element("dd", { class: kind ?? "" }, value), element("dd", { class: "more" }, note)));
  return element("dl", { class: "tiles" }, ...boxes);
}

// Returns a table. Each head is a text, and perhaps a class.
export function table(heads, rows, ...moreHeads) {
  const head = element("tr", {}, ...heads.map(([text, kind]) => element("th", { scope: "col", class: kind ?? "" }, text)), ...moreHeads);
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

// Returns a group of buttons, of which one is pressed. `choices` are pairs of a value and a text, and `choose(value)` is
// called when another is pressed.
export function choice(label, choices, chosen, choose) {
  const buttons = choices.map(([value, text]) => element("button", { type: "button", value, "aria-pressed": String(value === chosen) }, text));
  const press = ({ currentTarget: pressed }) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
    choose(pressed.value);
  };
  for (const button of buttons) button.addEventListener("click", press);
  return element("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
}

// Saves data as a file of the user.
export function saveAs(name, data) {
  const url = URL.createObjectURL(data);
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

export const numberCell = (text) => element("td", { class: "number" }, text);

// Returns labels at their places on an axis, for its ticks.
export function tickLabels(ticks) {
  return ticks.map(({ at, text }) => {
    const label = element("span", {}, text);
    label.style.left = `${100 * at}%`;
    return label;
  });
}

export function words(name) {
  return name.replaceAll("_", " ");
}

// Returns a time for people, with three significant digits, as the server does in logs and explanations.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0";
  const [unit, size] = [["µs", 1e-6], ["ms", 1e-3], ["s", 1]].find(([, size]) => seconds < 999.5 * size) ?? ["min", 60];
  const value = seconds / size;
  return `${value < 999.5 ? Number(value.toPrecision(3)) : value.toFixed(0)} ${unit}`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  return value >= 100 || Number.isInteger(value) ? count(Math.round(value)) : value.toFixed(1);
}

// Returns a whole number in full, as 5,056.
export function count(value) {
  return value.toLocaleString("en-US");
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString([], { hourCycle: "h23" });
}

// Returns [name, start, end, ...shares] in ms of each phase, from lists of a name, its nanoseconds, and if its causes
// are known, the sums that `partsOf` returns. Nanoseconds are added up before they become ms: a sum of rounded numbers
// could lie after the end of the request, and thus after the cut that follows it.
export function phaseSpans(startMs, phases) {
  let ns = 0;
  return phases.map(([name, phaseNs, ...parts]) => {
    const shares = parts.filter(Number.isFinite).map((part) => part / Math.max(1, phaseNs));
    return [name, startMs + ns * 1e-6, startMs + (ns += phaseNs) * 1e-6, ...shares];
  });
}

// Places `phases`, each [name, start, end] in ms, on the track. Phases outside the axis are left out. A phase with shares
// has the shades of `shades.js`: up to the first share alone, then for others, then of the machine, then the rest. A chat
// that was stored by an older version has no share of the machine.
export function placeBar(track, phases, axis) {
  const parts = phases.filter(([, from, to]) => to >= axis.from && from <= axis.to);
  while (track.children.length > parts.length) track.lastChild.remove();
  parts.forEach(([name, from, to, alone, shared, machine = shared], position) => {
    const part = track.children[position] ?? track.appendChild(element("i"));
    const left = axis.share(from);
    part.className = `phase-${name}${alone === undefined ? "" : " shaded"}`;
    if (alone !== undefined) {
      part.style.setProperty("--alone", `${100 * alone}%`);
      part.style.setProperty("--shared", `${100 * shared}%`);
      part.style.setProperty("--machine", `${100 * machine}%`);
    }
    part.style.left = `min(${100 * left}%, 100% - 1px)`;
    part.style.width = `${100 * (axis.share(to) - left)}%`;
  });
}

// Returns the text of a tick, a round time after the start of its stretch.
export function tick(ms) {
  const [value, unit] = ms >= 1000 ? [ms / 1000, "s"] : ms >= 1 ? [ms, "ms"] : [ms * 1000, "µs"];
  return `+${Number(value.toPrecision(6))} ${unit}`;
}

const JSON_TOKENS = /"(?:[^"\\]|\\.)*"|\{\s*\}|\[\s*\]|[{}[\],:]|[^\s{}[\],:"]+/g;

// Returns JSON text with a line for each member. Only its white space changes, while JSON.stringify would round large
// numbers and leave out names that come twice.
export function indented(json) {
  let depth = 0;
  const line = (change) => `\n${"  ".repeat((depth += change))}`;
  const shown = ([token]) => {
    if (token === ":") return ": ";
    if (token === ",") return token + line(0);
    if (token === "{" || token === "[") return token + line(1);
    if (token === "}" || token === "]") return line(-1) + token;
    return /^[{[]/.test(token) ? token[0] + token.at(-1) : token; // an object or a list without members has one line
  };
  return Array.from(json.matchAll(JSON_TOKENS), shown).join("");
}
