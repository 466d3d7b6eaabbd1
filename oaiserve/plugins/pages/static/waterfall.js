// Shows requests, one row each: first the open ones, then the last ended ones, in one of two views.
//
// One view has a common time axis, which shows the requests that ran at the same time. The time of the row that is
// pointed at, or has the focus, is marked on all rows. In the other view all bars begin at zero, the longest first.

import { Axis } from "./axis.js";
import { openParts } from "./open.js";
import { showRows } from "./rows.js";
import { partsOf, sharedLegend } from "./shades.js";
import { byId, clock, count, duration, element, PASSED_PHASES, PHASES, phasesFor, phaseSpans, placeBar, tickLabels, words } from "./show.js";
import { pageOf } from "./sse.js";
import { showTips } from "./tip.js";

const MS = 1e-6; // from nanoseconds
const receivedMs = (entry) => entry.received_unix_ns * MS;
const VIEWS = {
  "on-clock": { start: receivedMs, first: (a, b) => receivedMs(b) - receivedMs(a), label: clock },
  "by-duration": { start: () => 0, first: (a, b) => b.duration_ns - a.duration_ns, label: () => "0" },
};

export class Waterfall {
  constructor() {
    this.open = element("ol", { id: "open-requests", "aria-label": "Open requests" });
    this.axis = element("div", { class: "track axis" });
    this.list = element("ol", { id: "requests", "aria-label": "Ended requests" });
    this.all = element("div", { class: "waterfall", id: "waterfall", hidden: "" }, headsOf(this.axis), this.open, this.list);
    this.empty = byId("no-requests");
    this.cut = element("li", {}, element("i", { class: "cut" }), "cut: no requests");
    const names = [...new Set([...PHASES.slice(0, -1), ...PASSED_PHASES])];
    const phases = names.map((name) => element("li", { "data-phase": name }, element("i", { class: `phase-${name}` }), words(name)));
    this.legend = phases;
    this.shades = sharedLegend();
    this.empty.before(element("ul", { class: "legend", "aria-label": "Phases" }, ...phases, this.cut), this.shades, this.all);
    this.latest = { requests: [], open: [] };
    this.shown = this.latest;
    this.view = VIEWS["on-clock"];
    const pause = byId("pause");
    pause.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      pause.setAttribute("aria-pressed", String(this.isPaused));
      this.show(this.latest);
    });
    for (const id of Object.keys(VIEWS)) byId(id).addEventListener("click", () => this.#choose(id));
    for (const type of ["pointerover", "focusin"]) this.list.addEventListener(type, (event) => this.#mark(event.target));
    for (const type of ["pointerleave", "focusout"]) this.list.addEventListener(type, () => this.#mark(null));
    new ResizeObserver(() => this.#draw()).observe(this.axis);
    showTips(this.list, ".track", (track) => tipOf(track.closest("li").entry));
  }

  show({ requests, open }) {
    this.latest = { requests, open };
    if (this.isPaused) return;
    this.all.classList.toggle("has-clients", [...open, ...requests].some(({ client }) => client));
    this.shown = this.latest;
    const names = phasesFor(requests.flatMap(({ phases }) => phases));
    const shades = sharedLegend(names === PASSED_PHASES);
    this.shades.replaceWith(shades);
    this.shades = shades;
    const isShaded = requests.some(({ phases }) => phases.some(([, , alone]) => alone !== undefined));
    this.shades.hidden = !isShaded && !open.some(({ phases }) => phases.some(({ causes_ns: causes = {} }) => Object.keys(causes).length));
    for (const item of this.legend) item.hidden = !names.includes(item.dataset.phase);
    this.empty.hidden = requests.length + open.length > 0;
    this.all.hidden = !this.empty.hidden;
    this.#draw();
  }

  #choose(id) {
    this.view = VIEWS[id];
    for (const other of Object.keys(VIEWS)) byId(other).setAttribute("aria-pressed", String(other === id));
    this.#draw();
  }

  #draw() {
    const { start, first, label } = this.view;
    const { requests, open } = this.shown;
    const entries = requests.toSorted(first);
    const spans = [...entries, ...open].map((entry) => [start(entry), start(entry) + (entry.duration_ns ?? entry.elapsed_ns) * MS]);
    if (!spans.length) for (const list of [this.open, this.list]) list.replaceChildren();
    if (!spans.length || !this.axis.clientWidth) return;
    const axis = new Axis(spans, label);
    this.#drawAxis(axis);
    const rowAt = (entry, parts, phases) => {
      placeBar(parts.track, phaseSpans(start(entry), phases), axis);
      const key = `${entry.request_id} ${entry.received_unix_ns}`;
      return Object.assign(element("li", {}, rowOf(entry, parts)), { key });
    };
    const ended = entries.map((entry) => {
      const mark = [axis.share(start(entry)), axis.share(start(entry) + entry.duration_ns * MS)];
      return Object.assign(rowAt(entry, endedParts(entry), entry.phases), { entry, mark });
    });
    showRows(this.list, ended, [this.open]);
    showRows(this.open, open.map((entry) => rowAt(entry, openParts(entry), phasesSoFar(entry))));
    this.#mark(this.marked);
  }

  #drawAxis(axis) {
    const ticks = axis.ticks(this.axis.clientWidth);
    this.axis.replaceChildren(...tickLabels(ticks));
    const lines = ticks.map(({ at, isCut }) => `var(--${isCut ? "cut" : "tick"}) ${100 * at}% 0 / ${isCut ? 2 : 1}px 100% no-repeat`);
    this.cut.hidden = !ticks.some(({ isCut }) => isCut);
    this.all.style.setProperty("--lines", lines.join(", "));
  }

  // Marks the time of the row that contains `target` on all rows, or removes the mark if `target` is null.
  #mark(target) {
    this.marked = target?.isConnected ? target.closest("li") : null;
    const [from, to] = this.marked?.mark ?? [0, 0];
    this.all.style.setProperty("--mark-from", `${100 * from}%`);
    this.all.style.setProperty("--mark-width", `${100 * (to - from)}%`);
  }
}

function headsOf(axis) {
  const names = [["Received"], ["Route"], ["Model", "model"], ["Client", "client"], ["Outcome"], ["Tokens", "tokens"]];
  const heads = names.map(([name, kind]) => element("span", { class: kind ?? "" }, name));
  return element("div", { class: "row heads", "aria-hidden": "true" }, ...heads, axis, element("span", { class: "duration" }, "Took"));
}

// Returns the phases of an open request as an ended one has them, with the parts of each that are known so far.
function phasesSoFar({ phases }) {
  return phases.map(({ name, duration_ns: ns, causes_ns: causes = {} }) => [name, ns, ...partsOf(causes)]);
}

// Returns a row, which links to the page of its request. Its parts in braces differ between ended and open requests.
function rowOf(entry, { outcome, tokens, track, time }) {
  const { request_id: id, received_unix_ns: receivedNs, model, client, route } = entry;
  return element(
    "a",
    { class: "row", "data-request": id, href: pageOf(id) },
    element("span", { class: "quiet" }, clock(receivedNs / 1e6)),
    element("span", { class: "route", title: id }, route.replace(/^\/(v1\/)?/, "")),
    element("span", { class: "quiet model", title: model }, model),
    element("span", { class: "quiet client", title: client ?? "" }, client ?? "–"),
    outcome,
    tokens,
    track,
    element("span", { class: "duration" }, duration(time / 1e9)),
  );
}

function endedParts(entry) {
  const { outcome, status, prompt_tokens: prompt, completion_tokens: generated } = entry;
  const text = outcome === "finished" ? "finished" : `${outcome}${status && status !== 200 ? ` ${status}` : ""}`;
  return {
    outcome: element("span", { class: `outcome-${outcome}`, title: entry.error_type ?? "" }, text),
    tokens: element("span", { class: "quiet tokens" }, element("span", { class: "unseen" }, "tokens: "), `${count(prompt)} → ${count(generated)}`),
    track: element("span", { class: "track", "aria-hidden": "true" }),
    time: entry.duration_ns,
  };
}

function tipOf({ request_id: id, phases, prompt_tokens: prompt, cached_tokens: cached }) {
  const lines = phases.map(([name, ns, ...sums]) => {
    const added = addedOf(ns, ...sums);
    const fromCache = name === "prefill" && cached ? `, ${count(cached)} of ${count(prompt)} tokens from the cache` : "";
    return element("li", {}, element("i", { class: `phase-${name}` }), `${words(name)} `, element("b", {}, duration(ns / 1e9)), added, fromCache);
  });
  return [element("code", {}, id), element("ul", { class: "legend" }, ...lines)];
}

// Returns in words what was added to the time that a phase would have taken alone, from a hundredth of it on.
function addedOf(ns, alone = ns, shared = ns, delayed = ns, rest = "unexplained") {
  const parts = [["for others", shared - alone], ["while the machine was busy elsewhere", delayed - shared], [words(rest), ns - delayed]];
  return parts.filter(([, part]) => part >= ns / 100).map(([text, part]) => `, ${duration(part / 1e9)} ${text}`).join("");
}
