// Shows the last requests, one row each, in one of two views.
//
// One view has a common time axis, which shows the requests that ran at the same time. The time of the row that is
// pointed at, or has the focus, is marked on all rows. In the other view all bars begin at zero, the longest first.

import { Axis } from "./axis.js";
import { showDetail } from "./detail.js";
import { byId, clock, duration, element, PHASES, phaseSpans, placeBar, words } from "./show.js";

const MS = 1e-6; // from nanoseconds
const receivedMs = (entry) => entry.received_unix_ns * MS;
const VIEWS = {
  "on-clock": { start: receivedMs, first: (a, b) => receivedMs(b) - receivedMs(a), label: clock },
  "by-duration": { start: () => 0, first: (a, b) => b.duration_ns - a.duration_ns, label: () => "0" },
};

export class Waterfall {
  constructor() {
    this.all = byId("waterfall");
    this.list = byId("requests");
    this.axis = byId("axis");
    this.empty = byId("no-requests");
    this.rows = new Map();
    this.latest = this.entries = [];
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
    byId("phase-legend").append(...PHASES.map((name) => element("li", {}, element("i", { class: `phase-${name}` }), words(name))));
  }

  show(requests) {
    this.latest = requests;
    if (this.isPaused) return;
    this.entries = requests;
    this.all.hidden = requests.length === 0;
    this.empty.hidden = requests.length > 0;
    this.#draw();
  }

  #choose(id) {
    this.view = VIEWS[id];
    for (const other of Object.keys(VIEWS)) byId(other).setAttribute("aria-pressed", String(other === id));
    this.#draw();
  }

  #draw() {
    if (!this.entries.length || !this.axis.clientWidth) return;
    const { start, first, label } = this.view;
    const entries = this.entries.toSorted(first);
    const axis = new Axis(entries.map((entry) => [start(entry), start(entry) + entry.duration_ns * MS]), label);
    this.#drawAxis(axis);
    const shown = new Map();
    for (const entry of entries) {
      const key = `${entry.request_id} ${entry.received_unix_ns}`;
      const row = this.rows.get(key) ?? makeRow(entry);
      const parts = phaseSpans(start(entry), entry.phases);
      placeBar(row.querySelector(".track"), parts, axis);
      row.mark = [axis.share(start(entry)), axis.share(start(entry) + entry.duration_ns * MS)];
      shown.set(key, row);
    }
    this.#arrange(shown);
    this.#mark(this.marked);
  }

  #drawAxis(axis) {
    const ticks = axis.ticks(this.axis.clientWidth);
    this.axis.replaceChildren(
      ...ticks.map(({ at, text }) => {
        const label = element("span", {}, text);
        label.style.left = `${100 * at}%`;
        return label;
      }),
    );
    const lines = ticks.map(({ at, isCut }) => `var(--${isCut ? "cut" : "tick"}) ${100 * at}% 0 / ${isCut ? 2 : 1}px 100% no-repeat`);
    this.all.style.setProperty("--lines", lines.join(", "));
  }

  // Rows stay the same elements, so that a row with the focus keeps it.
  #arrange(shown) {
    for (const [key, row] of this.rows) {
      if (!shown.has(key) && !row.contains(document.activeElement)) row.remove();
    }
    let before = null;
    for (const row of [...shown.values()].reverse()) {
      if (row.parentNode !== this.list || row.nextSibling !== before) {
        if (!row.contains(document.activeElement)) this.list.insertBefore(row, before);
      }
      before = row;
    }
    this.rows = shown;
  }

  // Marks the time of the row that contains `target` on all rows, or removes the mark if `target` is null.
  #mark(target) {
    this.marked = target?.isConnected ? target.closest("li") : null;
    const [from, to] = this.marked?.mark ?? [0, 0];
    this.all.style.setProperty("--mark-from", `${100 * from}%`);
    this.all.style.setProperty("--mark-width", `${100 * (to - from)}%`);
  }
}

function makeRow(entry) {
  const tokens = `${entry.prompt_tokens} → ${entry.completion_tokens}`;
  const button = element(
    "button",
    { type: "button", class: "row", "data-request": entry.request_id, onclick: () => showDetail(entry.request_id) },
    element("span", { class: "quiet" }, clock(entry.received_unix_ns / 1e6)),
    element("span", { class: "id" }, entry.request_id),
    element("span", { class: `outcome-${entry.outcome}` }, entry.outcome),
    element("span", { class: "quiet tokens", "aria-label": `${entry.prompt_tokens} prompt tokens, ${entry.completion_tokens} generated` }, tokens),
    element("span", { class: "track", "aria-hidden": "true" }),
    element("span", { class: "duration" }, duration(entry.duration_ns / 1e9)),
  );
  return element("li", {}, button);
}
