// Makes the account of an ended request: sentences on its causes, its phases on a time axis, and all other facts.

import { Axis } from "./axis.js";
import { costFacts } from "./costs.js";
import { linked } from "./linked.js";
import { ownerOf } from "./open.js";
import { isAloneUnknown, partsOf, restOf, shadeLegend, shadeOf, shadeSwatch } from "./shades.js";
import { count, duration, element, facts, numberCell, percent, phaseSpans, placeBar, table, tickLabels, tiles, words } from "./show.js";
import { clientsPage, pageOf, requestsOf, runPageOf } from "./sse.js";

const MS = 1e-6; // from nanoseconds
const AXIS_SHARE = 0.5; // roughly the axis' share of the page's width, which determines its ticks
const LONG_ID = 16; // characters, after which ids in tables are cut
const ONE_TOKEN = 1.05; // tokens in each piece of an answer, up to which its tokens come one by one
const MOST_EVENTS = 12; // a longer list is folded

export function account(entry) {
  const { num_draft_tokens: drafted, num_accepted_tokens: accepted } = entry;
  return [
    summary(entry),
    ...(entry.explanation.length ? [element("div", { class: "card why" }, ...entry.explanation.map((sentence) => element("p", {}, ...linked(sentence, entry.explanation_requests ?? []))))] : []),
    element("h2", {}, "Where the time went"),
    waterfall(entry),
    ...causes(entry),
    ...waits(entry),
    ...others(entry),
    element("h2", {}, "Details"),
    facts([
      ...(entry.finish_reasons.length ? [["Finish", entry.finish_reasons.join(", ")]] : []),
      ...(entry.error_type ? [["Error", entry.error_type]] : []),
      ...mediaFacts(entry.media),
      ...(drafted ? [["Drafts", `${count(drafted)} ${drafted === 1 ? "token" : "tokens"}: ${count(accepted)} accepted, ${count(drafted - accepted)} rejected`]] : []),
      ...(entry.token_gaps ? [betweenTokens(entry)] : []),
      ...(entry.routing.engine ? [] : [["Steps", steps(entry.steps)]]),
      ...targets(entry.slo),
      ...machineUsers(entry.machine_users_ns ?? {}),
      ...costFacts(cost(entry), Boolean(drafted)),
      ...(Object.keys(entry.params).length ? [["Parameters", pairs(entry.params)]] : []),
      ...(entry.adapted?.length ? [["Adapted", entry.adapted.join("; ")]] : []),
      ...(Object.keys(entry.routing).length ? [["Sent to", routing(entry.routing)]] : []),
      ...(entry.run_id ? [["Run", document.querySelector(".pages a[href='../runs']") ? element("a", { href: runPageOf(entry.run_id) }, entry.run_id) : entry.run_id]] : []),
      ["Trace", element("code", {}, entry.trace_id)],
    ]),
    ...eventTable(entry),
    ...neighbours(entry),
  ];
}

function summary(entry) {
  const { outcome, status, error_type: error, prompt_tokens: prompt, cached_tokens: cached, completion_tokens: generated } = entry;
  const { time_to_first_token_ns: firstNs } = entry;
  const isPassed = Boolean(entry.routing.engine);
  const reported = (tokens) => (isPassed && !prompt ? "–" : count(tokens)); // An engine of another kind may not count them.
  const decode = entry.phases.find(({ name }) => name === "decode" || (name === "stream" && entry.stream));
  const rate = decode && generated > 1 ? `${((generated - 1) / (decode.duration_ns / 1e9)).toFixed(1)} tok/s` : "–";
  const end = outcome === "cancelled" ? "its client left" : status ? `status ${status}` : "no status";
  return tiles([
    ["Outcome", outcome, [end, error].filter(Boolean).join(", "), `outcome-${outcome}`],
    ["Duration", duration(entry.duration_ns / 1e9), firstNs === null ? "no first token" : `first token after ${duration(firstNs / 1e9)}`],
    ["Prompt", reported(prompt), cached ? `${count(cached)} from the cache` : isPassed ? "none reported as cached" : "none from the cache"],
    ["Answer", reported(generated), rate],
  ]);
}

const pairs = (values) => Object.entries(values).map(([name, value]) => `${words(name)} ${shownValue(name, value)}`).join(", ");
const shownValue = (name, value) => (Number.isInteger(value) && name !== "seed" ? count(value) : value); // a seed is copied

// What causes mean, where their name does not say it.
const CAUSES = {
  alone: "as without other requests",
  neighbour_decodes: "tokens of other requests in the same steps",
  neighbour_prompts: "prompts of other requests in the same steps",
  neighbour_media: "images and sounds of other requests",
  own_media: "images and sounds of its later prompts",
  constraint: "masks of grammars",
  host: "no step ran",
  machine: "other programs took the cores, or the disk was read",
  standstill: "the whole server was stopped or frozen",
  engine_restart: "the engine process had ended, and another one was started",
  unexplained: "steps that took longer than expected",
  inside_engine: "the engine does not say, and it can't be seen from outside",
};
// What they mean at an engine of another kind, where they are estimates.
const PASSED_CAUSES = {
  ...CAUSES,
  neighbour_decodes: "about: answers of other requests at the engine",
  neighbour_prompts: "about: prompts of other requests at the engine",
};
const REASONS = {
  prefix: "whose cache has the longest known beginning of this prompt",
  shorter_prefix: "whose cache has a shorter beginning of this prompt, as those with the longest were busy",
  spilled: "as the replicas with a beginning of this prompt in their cache were busy",
  new: "as no replica was known to have a beginning of this prompt in its cache",
};

// Returns the replica that a gateway chose, and why, or the engine of another kind that it is in front of.
function routing({ replica, reason, expected_hit_tokens: tokens, load, bound, engine, engine_kind: kind, engine_version: version, unread }) {
  if (engine) return `engine ${engine} (${[kind, version].filter(Boolean).join(" ")})${unread ? `; its answer could not be read: ${unread}` : ""}`;
  const cached = tokens ? `; ${count(tokens)} or more tokens expected in its cache` : "";
  return `${replica}, ${REASONS[reason] ?? words(reason)}${cached}; load ${load.toFixed(1)} of at most ${bound.toFixed(1)} requests`;
}

// Returns a row for each phase on one time axis, with the tokens from the cache in that of the prefill. An open request has
// no routing yet.
export function waterfall(entry) {
  const axis = new Axis([[0, entry.duration_ns * MS]], () => "0");
  const ticks = axis.ticks(AXIS_SHARE * innerWidth).filter(({ text }) => text);
  const lines = ticks.map(({ at }) => `linear-gradient(var(--grid) 0 0) ${100 * at}% 0 / 1px 100% no-repeat`).join(", ");
  const rows = entry.phases.map((phase) => {
    const track = element("div", { class: "track", "aria-hidden": "true" });
    track.style.background = lines;
    place(track, axis, [phase]);
    const label = element("th", { scope: "row" }, element("i", { class: `phase-${phase.name}` }), words(phase.name), ...cacheShare(phase, entry));
    const row = element("tr", {}, label, numberCell(duration(phase.duration_ns / 1e9)), numberCell(percent(phase.share)), element("td", { class: "wide" }, track));
    row.dataset.phase = phase.name;
    row.dataset.durationNs = phase.duration_ns;
    return row;
  });
  const axisCell = element("th", { class: "wide", "aria-hidden": "true" }, element("div", { class: "track axis" }, ...tickLabels(ticks)));
  const heads = [["Phase"], ["Time", "number"], ["Share", "number"]];
  const causes = entry.phases.map(({ causes_ns: found = {} }) => found);
  const legend = causes.some((found) => partsOf(found).length) ? [shadeLegend(restOf(causes), Boolean(entry.routing?.engine))] : [];
  return element("div", { class: "phases" }, table(heads, rows, axisCell), ...legend);
}

// Returns the cached share of the prompt as a bar, because prefill computes only the rest.
function cacheShare({ name }, { prompt_tokens: prompt, cached_tokens: cached }) {
  if (name !== "prefill" || !prompt) return [];
  const bar = element("span", { class: "cache-share", "aria-hidden": "true" }, element("i", {}));
  bar.firstChild.style.width = `${(100 * cached) / prompt}%`;
  return [bar, element("small", {}, `${count(cached)} of ${count(prompt)} tokens from the cache`)];
}

function place(track, axis, phases) {
  const spans = phases.flatMap(({ name, start_ns: start, duration_ns: ns, causes_ns: found = {} }) => phaseSpans(start * MS, [[name, ns, ...partsOf(found)]]));
  placeBar(track, spans, axis);
}

// Returns whether a finished request has met its objectives.
function targets(slo) {
  const names = { ttft: "first token within", tpot: "each token within" };
  const texts = Object.entries(slo ?? {}).filter(([, found]) => found).map(([name, { target_ns: ns, is_met: isMet }]) => `${names[name]} ${duration(ns / 1e9)}: ${isMet ? "met" : "missed"}`);
  return texts.length ? [["Objectives", texts.join("; ")]] : [];
}

function mediaFacts(media) {
  if (!media) return [];
  const { images, sounds, image_tokens: ofImages, audio_tokens: ofSounds, cached, encode_ns: ns } = media;
  const value = `${images} and ${sounds} (${cached} cached), ${count(ofImages + ofSounds)} tokens, encoded in ${duration(ns / 1e9)}`;
  return [["Images and sounds", value]];
}

// Returns the cost of a request. What it would have taken alone is the sum of its causes, as in its explanation. The
// server's estimate, which has one token a step, stays where causes don't describe it: with drafts, images or sounds.
function cost({ cost: found, phases, num_draft_tokens: drafted, media }) {
  const parts = phases.filter(({ name }) => ["prefill", "decode"].includes(name)).map(({ causes_ns: causes }) => causes.alone);
  if (drafted || media || !parts.length || parts.includes(undefined)) return found;
  return { ...found, alone_ns: parts.reduce((sum, ns) => sum + ns, 0) };
}

// Returns the times between tokens, or between pieces of several tokens, as drafts make them.
function betweenTokens({ token_gaps: found, mean_event_tokens: number, routing: { engine } }) {
  if (engine) return ["Between events with text", gaps(found)];
  return number > ONE_TOKEN ? ["Between pieces", `${gaps(found)}; ${number.toFixed(1)} tokens in each`] : ["Between tokens", gaps(found)];
}

function gaps(found) {
  return `p50 ${duration(found.p50_ns / 1e9)}, p99 ${duration(found.p99_ns / 1e9)}, at most ${duration(found.max_ns / 1e9)}`;
}

// Returns who used the machine's cores while the server waited for them.
function machineUsers(users) {
  const texts = Object.entries(users).map(([user, ns]) => `${user} ${duration(ns / 1e9)}`);
  return texts.length ? [["Machine busy with", texts.join(", ")]] : [];
}

function steps(found) {
  if (!found) return "none";
  return `${count(found.number)} (${count(found.first)} to ${count(found.last)}), ${found.mean_sequences.toFixed(1)} sequences in each on average`;
}

function causes(entry) {
  const meanings = entry.routing.engine ? PASSED_CAUSES : CAUSES;
  const phases = entry.phases.filter(({ causes_ns: found }) => Object.keys(found).length);
  if (!phases.length) return [];
  const total = (name) => phases.reduce((sum, { causes_ns: found }) => sum + (found[name] ?? 0), 0);
  const names = [...new Set(phases.flatMap(({ causes_ns: found }) => Object.keys(found)))].sort((a, b) => total(b) - total(a));
  const rows = names.map((name) => {
    const cells = phases.map(({ causes_ns: found }) => numberCell(name === "alone" && isAloneUnknown(found) ? "not known yet" : duration((found[name] ?? 0) / 1e9)));
    return element("tr", {}, element("td", {}, shadeSwatch(shadeOf(name)), words(name), ...(name in meanings ? [" ", element("small", {}, meanings[name])] : [])), ...cells);
  });
  return [element("h2", {}, "Causes"), table([["Cause"], ...phases.map(({ name }) => [words(name), "number"])], rows)];
}

// Returns a cell with phases on the time axis of the request, from its start to its end.
function timeCell(entry, phases) {
  const track = element("div", { class: "track" });
  place(track, new Axis([[0, entry.duration_ns * MS]], () => ""), phases);
  return element("td", { class: "wide", "aria-hidden": "true" }, track);
}

function waits(entry) {
  const reasons = Object.entries(entry.queue_waits_ns).sort((a, b) => b[1] - a[1]);
  const stalled = entry.num_preemptions ? [["preempted", entry.stalled_ns]] : [];
  const rows = [...reasons, ...stalled].map(([reason, ns]) =>
    element("tr", {}, element("td", {}, words(reason)), numberCell(duration(ns / 1e9))),
  );
  return rows.length ? [element("h2", {}, "What it waited for"), table([["Reason"], ["Time", "number"]], rows)] : [];
}

// Returns whose requests it waited for, in the queue and in its steps, with the time that they took in each phase.
function others(entry) {
  const phases = entry.phases.filter(({ others: found }) => found?.length);
  if (!phases.length) return [];
  const sums = {};
  for (const { name: phase, others: found } of phases) {
    for (const { whose, client, ...times } of found) {
      const name = ownerOf(whose, client);
      const row = (sums[name] ??= { client: name === client ? client : null });
      row[phase] = Object.values(times).reduce((sum, ns) => sum + ns, 0);
    }
  }
  const rows = Object.entries(sums).map(([name, row]) => {
    const text = row.client ? element("a", { href: requestsOf(row.client) }, name) : name;
    return element("tr", {}, element("td", {}, text), ...phases.map(({ name: phase }) => numberCell(row[phase] ? duration(row[phase] / 1e9) : "–")));
  });
  const heads = [["Requests of"], ...phases.map(({ name }) => [words(name), "number"])];
  const all = element("p", { class: "note" }, element("a", { href: clientsPage() }, "All clients"), ": who made whom wait.");
  return [element("h2", {}, "Whose requests it waited for"), table(heads, rows), all];
}

function eventTable(entry) {
  if (!entry.events.length) return [];
  const rows = entry.events.map((event) => {
    return element("tr", {}, numberCell(duration(event.at_ns / 1e9)), element("td", {}, words(event.name)), element("td", {}, pairs(event.details)));
  });
  const dropped = entry.num_events_dropped ? [element("p", { class: "note" }, `${count(entry.num_events_dropped)} more events were dropped.`)] : [];
  const shown = [table([["After", "number"], ["Event"], ["Details"]], rows), ...dropped];
  const isLong = rows.length > MOST_EVENTS;
  return [element("h2", {}, "Events"), ...(isLong ? [element("details", {}, element("summary", {}, `All ${rows.length}`), ...shown)] : shown)];
}

function neighbours(entry) {
  if (!entry.num_neighbours) return [];
  const rows = entry.neighbours.map((other) => {
    const id = other.request_id;
    const link = element("a", { href: pageOf(id), title: id }, id.length > LONG_ID ? `${id.slice(0, LONG_ID)}…` : id);
    return element(
      "tr",
      {},
      element("td", { class: "id" }, link),
      element("td", { class: "number tokens" }, `${count(other.prompt_tokens)} → ${count(other.completion_tokens)}`),
      numberCell(count(other.num_shared_steps)),
      timeCell(entry, other.phases),
    );
  });
  const heads = [["Request"], ["Tokens", "number tokens"], ["Steps together", "number"], [`0 to ${duration(entry.duration_ns / 1e9)}`, "wide"]];
  const title = `In the same steps: ${count(entry.num_neighbours)} other ${entry.num_neighbours === 1 ? "request" : "requests"}`;
  return [element("h2", {}, title), table(heads, rows)];
}
