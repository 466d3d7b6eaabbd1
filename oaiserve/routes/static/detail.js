// Shows the account of one request in a dialog.

import { Axis } from "./axis.js";
import { costFacts } from "./costs.js";
import { byId, duration, element, percent, partsOf, phaseCells, phaseSpans, placeBar, words } from "./show.js";
import { request } from "./sse.js";

const MS = 1e-6; // from nanoseconds

export async function showDetail(requestId) {
  const dialog = byId("detail");
  const body = byId("detail-body");
  byId("detail-title").textContent = requestId;
  try {
    const response = await request(`debug/requests/${encodeURIComponent(requestId)}`, { headers: { accept: "application/json" } });
    body.replaceChildren(...account(await response.json()));
  } catch (error) {
    if (error.needsKey) return; // the page asks for the key outside the dialog
    body.replaceChildren(element("p", { class: "error" }, error.message));
  }
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

export function account(entry) {
  const { num_draft_tokens: drafted, num_accepted_tokens: accepted, time_to_first_token_ns: firstNs } = entry;
  return [
    facts([
      ["Outcome", `${entry.outcome}${entry.status ? `, status ${entry.status}` : ""}${entry.error_type ? `, ${entry.error_type}` : ""}`],
      ["Finish", entry.finish_reasons.join(", ") || "–"],
      ["Tokens", `${entry.prompt_tokens} prompt (${entry.cached_tokens} cached), ${entry.completion_tokens} generated`],
      ...mediaFacts(entry.media),
      ...(drafted ? [["Drafts", `${drafted} tokens: ${accepted} accepted, ${drafted - accepted} rejected`]] : []),
      ["Duration", `${duration(entry.duration_ns / 1e9)}, first token after ${duration(firstNs === null ? null : firstNs / 1e9)}`],
      ["Between events", gaps(entry.token_gaps)],
      ["Tokens per event", entry.mean_event_tokens?.toFixed(1) ?? "–"],
      ["Steps", steps(entry.steps)],
      ...costFacts(entry.cost),
      ["Trace", entry.trace_id],
    ]),
    element("h3", {}, "Phases"),
    ...entry.explanation.map((sentence) => element("p", { class: "why" }, sentence)),
    phaseTable(entry),
    ...causes(entry),
    ...waits(entry),
    ...eventTable(entry),
    ...neighbours(entry),
  ];
}

function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function mediaFacts(media) {
  if (!media) return [];
  const { images, sounds, image_tokens: ofImages, audio_tokens: ofSounds, cached, encode_ns: ns } = media;
  const value = `${images} and ${sounds} (${cached} cached), ${ofImages + ofSounds} tokens, encoded in ${duration(ns / 1e9)}`;
  return [["Images and sounds", value]];
}

function gaps(found) {
  if (!found) return "–";
  return `p50 ${duration(found.p50_ns / 1e9)}, p99 ${duration(found.p99_ns / 1e9)}, at most ${duration(found.max_ns / 1e9)}`;
}

function steps(found) {
  if (!found) return "none";
  return `${found.number} (${found.first} to ${found.last}), ${found.mean_sequences.toFixed(1)} sequences in each on average`;
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map(([text, kind]) => element("th", { scope: "col", class: kind ?? "" }, text)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function phaseTable(entry) {
  const rows = entry.phases.map((phase) => {
    const row = phaseCells(phase.name, phase.duration_ns, element("td", { class: "number" }, percent(phase.share)), timeCell(entry, [phase]));
    row.dataset.phase = phase.name;
    row.dataset.durationNs = phase.duration_ns;
    return row;
  });
  return table([["Phase"], ["Time", "number"], ["Share", "number"], ...timeHead(entry)], rows);
}

function causes(entry) {
  const phases = entry.phases.filter(({ causes_ns: found }) => Object.keys(found).length);
  if (!phases.length) return [];
  const names = [...new Set(phases.flatMap(({ causes_ns: found }) => Object.keys(found)))];
  const rows = names.map((name) => {
    const cells = phases.map(({ causes_ns: found }) => element("td", { class: "number" }, duration((found[name] ?? 0) / 1e9)));
    return element("tr", {}, element("td", {}, words(name)), ...cells);
  });
  return [element("h3", {}, "Causes"), table([["Cause"], ...phases.map(({ name }) => [words(name), "number"])], rows)];
}

// Returns a cell with phases on the time axis of the dialog's request, from its start to its end.
function timeCell(entry, phases) {
  const track = element("div", { class: "track" });
  const axis = new Axis([[0, entry.duration_ns * MS]], () => "");
  const spans = phases.flatMap(({ name, start_ns: start, duration_ns: ns, causes_ns: found = {} }) => phaseSpans(start * MS, [[name, ns, ...partsOf(found)]]));
  placeBar(track, spans, axis);
  return element("td", { class: "wide", "aria-hidden": "true" }, track);
}

function timeHead(entry) {
  return [[`0 to ${duration(entry.duration_ns / 1e9)}`, "wide"]];
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
  const dropped = entry.num_events_dropped ? [element("p", { class: "note" }, `${entry.num_events_dropped} more events were dropped.`)] : [];
  return [element("h3", {}, "Events"), table([["After", "number"], ["Event"], ["Details"]], rows), ...dropped];
}

function neighbours(entry) {
  if (!entry.num_neighbours) return [];
  const rows = entry.neighbours.map((other) => {
    const button = element("button", { type: "button", class: "link", onclick: () => showDetail(other.request_id) }, other.request_id);
    return element(
      "tr",
      {},
      element("td", {}, button),
      element("td", { class: "number tokens" }, `${other.prompt_tokens} → ${other.completion_tokens}`),
      element("td", { class: "number" }, String(other.num_shared_steps)),
      timeCell(entry, other.phases),
    );
  });
  const heads = [["Request"], ["Tokens", "number tokens"], ["Steps together", "number"], ...timeHead(entry)];
  return [element("h3", {}, `In the same steps: ${entry.num_neighbours} ${entry.num_neighbours === 1 ? "other" : "others"}`), table(heads, rows)];
}
