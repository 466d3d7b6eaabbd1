// The last requests, a line each, and the account of one of them.

import { clock, duration, element, fillBar, percent, phaseCells, PHASES, words } from "./show.js";
import { request } from "./sse.js";

export class Waterfall {
  constructor() {
    this.list = document.getElementById("waterfall");
    this.empty = document.getElementById("no-requests");
    this.rows = new Map();
    const pause = document.getElementById("pause");
    pause.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      pause.setAttribute("aria-pressed", String(this.isPaused));
      if (!this.isPaused && this.latest) this.show(this.latest);
    });
    document
      .getElementById("phase-legend")
      .append(...PHASES.map((name) => element("li", {}, element("i", { class: `phase-${name}` }), words(name))));
  }

  // Lines stay the same elements, so that one with the focus keeps it.
  show(requests) {
    this.latest = requests;
    if (this.isPaused) return;
    this.empty.hidden = requests.length > 0;
    const longestNs = Math.max(1, ...requests.map((entry) => entry.duration_ns));
    const shown = new Map();
    for (const entry of requests) {
      const key = `${entry.request_id} ${entry.received_unix_ns}`;
      const row = this.rows.get(key) ?? makeRow(entry);
      fillBar(row.querySelector(".bar"), entry.phases, longestNs);
      shown.set(key, row);
    }
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
}

function makeRow(entry) {
  const tokens = `${entry.prompt_tokens} → ${entry.completion_tokens}`;
  const button = element(
    "button",
    { type: "button", "data-request": entry.request_id, onclick: () => showDetail(entry.request_id) },
    element("span", { class: "quiet" }, clock(entry.received_unix_ns / 1e6)),
    element("span", { class: "id" }, entry.request_id),
    element("span", { class: `outcome-${entry.outcome}` }, entry.outcome),
    element("span", { class: "quiet tokens", "aria-label": `${entry.prompt_tokens} prompt tokens, ${entry.completion_tokens} generated` }, tokens),
    element("span", { class: "bar", "aria-hidden": "true" }),
    element("span", { class: "duration" }, duration(entry.duration_ns / 1e9)),
  );
  return element("li", {}, button);
}

export async function showDetail(requestId) {
  const dialog = document.getElementById("detail");
  const body = document.getElementById("detail-body");
  document.getElementById("detail-title").textContent = requestId;
  try {
    const response = await request(`/debug/requests/${encodeURIComponent(requestId)}`, { headers: { accept: "application/json" } });
    body.replaceChildren(...account(await response.json()));
  } catch (error) {
    body.replaceChildren(element("p", { class: "error" }, error.message));
  }
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function account(entry) {
  return [
    facts([
      ["Outcome", `${entry.outcome}${entry.status ? `, status ${entry.status}` : ""}${entry.error_type ? `, ${entry.error_type}` : ""}`],
      ["Finish", entry.finish_reasons.join(", ") || "–"],
      ["Tokens", `${entry.prompt_tokens} prompt (${entry.cached_tokens} cached), ${entry.completion_tokens} generated`],
      ["Duration", `${duration(entry.duration_ns / 1e9)}, first token after ${duration(nanoseconds(entry.time_to_first_token_ns))}`],
      ["Between tokens", gaps(entry.token_gaps)],
      ["Steps", steps(entry.steps)],
      ["Trace", entry.trace_id],
    ]),
    element("h3", {}, "Phases"),
    phaseTable(entry),
    ...waits(entry),
    ...eventTable(entry),
    ...neighbours(entry),
  ];
}

function nanoseconds(ns) {
  return ns === null ? null : ns / 1e9;
}

function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function gaps(found) {
  if (!found) return "–";
  return `p50 ${duration(found.p50_ns / 1e9)}, p99 ${duration(found.p99_ns / 1e9)}, at most ${duration(found.max_ns / 1e9)}`;
}

function steps(found) {
  if (!found) return "in none";
  return `${found.number} (${found.first} to ${found.last}), ${found.mean_sequences.toFixed(1)} sequences in each on average`;
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map(([text, kind]) => element("th", { scope: "col", class: kind ?? "" }, text)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function phaseTable(entry) {
  const rows = entry.phases.map((phase) => {
    const bar = element("span", { class: "bar" });
    fillBar(bar, [["none", phase.start_ns], [phase.name, phase.duration_ns]], entry.duration_ns);
    const row = phaseCells(phase.name, phase.duration_ns, element("td", { class: "number" }, percent(phase.share)), element("td", { class: "wide", "aria-hidden": "true" }, bar));
    row.dataset.phase = phase.name;
    row.dataset.durationNs = phase.duration_ns;
    return row;
  });
  return table([["Phase"], ["Time", "number"], ["Share", "number"], [""]], rows);
}

function waits(entry) {
  const reasons = Object.entries(entry.queue_waits_ns).sort((a, b) => b[1] - a[1]);
  const stalled = entry.num_preemptions ? [["preempted", entry.stalled_ns]] : [];
  const rows = [...reasons, ...stalled].map(([reason, ns]) =>
    element("tr", {}, element("td", {}, words(reason)), element("td", { class: "number" }, duration(ns / 1e9))),
  );
  const title = element("h3", {}, "What it waited for");
  return [title, rows.length ? table([["Reason"], ["Time", "number"]], rows) : element("p", { class: "note" }, "Nothing.")];
}

function eventTable(entry) {
  if (!entry.events.length) return [];
  const rows = entry.events.map((event) => {
    const details = Object.entries(event.details).map(([name, value]) => `${words(name)} ${value}`).join(", ");
    return element("tr", {}, element("td", { class: "number" }, duration(event.at_ns / 1e9)), element("td", {}, words(event.name)), element("td", {}, details));
  });
  const dropped = entry.num_events_dropped ? [element("p", { class: "note" }, `${entry.num_events_dropped} more were not kept.`)] : [];
  return [element("h3", {}, "Events"), table([["After", "number"], ["Event"], ["Details"]], rows), ...dropped];
}

function neighbours(entry) {
  if (!entry.num_neighbours) return [];
  const items = entry.neighbours.map((other) =>
    element("li", {}, element("button", { type: "button", onclick: () => showDetail(other.request_id) }, `${other.request_id}: ${other.num_shared_steps} ${other.num_shared_steps === 1 ? "step" : "steps"} together`)),
  );
  return [element("h3", {}, `In the same steps: ${entry.num_neighbours} others`), element("ul", {}, ...items)];
}
