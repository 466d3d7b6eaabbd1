// Makes elements, bars and texts: durations, numbers, times and JSON as people read them.

export const PHASES = ["receive", "tokenize_wait", "tokenize", "encode_media", "queue", "prefill", "decode", "respond"];

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

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${(seconds / 60).toFixed(1)} min`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

// Returns a whole number in full, as 5,056.
export function count(value) {
  return value.toLocaleString("en-US");
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString([], { hour12: false });
}

// Returns [name, start, end, ...shares] in ms of each phase, from lists of a name, its nanoseconds, and if its causes
// are known, its time alone and that with its neighbours. Nanoseconds are added up before they become ms: a sum of
// rounded numbers could lie after the end of the request, and thus after the cut that follows it.
export function phaseSpans(startMs, phases) {
  let ns = 0;
  return phases.map(([name, phaseNs, ...parts]) => {
    const shares = parts.map((part) => part / Math.max(1, phaseNs));
    return [name, startMs + ns * 1e-6, startMs + (ns += phaseNs) * 1e-6, ...shares];
  });
}

// Returns what a phase took alone, and that with its neighbours, by its causes; nothing where these are not known.
export function partsOf(causes) {
  const { alone = 0, neighbour_decodes: decodes = 0, neighbour_prompts: prompts = 0, neighbour_media: media = 0 } = causes;
  return Object.keys(causes).length ? [alone, alone + decodes + prompts + media] : [];
}

// Places `phases`, each [name, start, end] in ms, on the track. Phases outside the axis are left out. A phase with two
// shares is shaded: what it would have taken alone is solid, what its neighbours added is lighter, the rest is light.
export function placeBar(track, phases, axis) {
  const parts = phases.filter(([, from, to]) => to >= axis.from && from <= axis.to);
  while (track.children.length > parts.length) track.lastChild.remove();
  parts.forEach(([name, from, to, alone, shared], position) => {
    const part = track.children[position] ?? track.appendChild(element("i"));
    const left = axis.share(from);
    part.className = `phase-${name}${alone === undefined ? "" : " shaded"}`;
    if (alone !== undefined) {
      part.style.setProperty("--alone", `${100 * alone}%`);
      part.style.setProperty("--shared", `${100 * shared}%`);
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
