// Shows the run that the address names: its time line, how its context grows, and its turns.

import { Axis } from "./axis.js";
import { keepLoading } from "./page.js";
import { linked } from "./linked.js";
import { stateOf } from "./run_state.js";
import { sharedLegend } from "./shades.js";
import { byId, count, duration, element, numberCell, percent, PASSED_PHASES, phasesFor, phaseSpans, placeBar, saveAs, setStatus, showProblem, table, tickLabels, tiles, words } from "./show.js";
import { pageOf, request, textOrRefusal } from "./sse.js";

const EVERY_MS = 2000; // while it is live or may soon go on, and the page is visible
const LATER_MS = 60_000; // after that
const SOON_NS = 600e9; // since its last request
const MOST_SENTENCES = 3; // on what was read again
const MOST_TURNS = 50; // a longer list is folded
const LEAST_SHARE = 2e-4; // of the time line: shorter phases are not drawn
const MS = 1e-6; // from nanoseconds
const PARTS = ["system", "tools", "user", "answers", "tool_results", "other"];
const PART_NAMES = { tools: "descriptions of tools", user: "user's messages", tool_results: "results of tools" };
const path = location.pathname.split("/").at(-1); // still encoded
let shown = "";

// Shows the run, or why there is none. Returns when to load it again: a silent run may go on.
function show({ json, refusal }) {
  if (refusal) return byId("run").replaceChildren(element("div", { class: "card" }, element("p", {}, refusal.message)));
  const run = JSON.parse(json);
  setStatus("live", "Connected");
  byId("save").disabled = false;
  const now = JSON.stringify({ ...run, silent_ns: stateOf(run) });
  if (now !== shown) draw(run);
  shown = now;
  return run.is_live || run.silent_ns < SOON_NS ? EVERY_MS : LATER_MS;
}

function draw(run) {
  const isOpen = byId("run").querySelector("details")?.open ?? false;
  const when = new Date(run.started_unix_ns / 1e6).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
  const replicas = run.replicas.length ? [`${run.replicas.length === 1 ? "replica" : "replicas"} ${run.replicas.join(", ")}`] : [];
  byId("subtitle").textContent = [...(run.program ? [run.program] : []), `since ${when}`, stateOf(run), run.model, ...(run.client ? [`key “${run.client}”`] : []), ...replicas].join(" · ");
  byId("run").replaceChildren(
    summary(run),
    ...readAgain(run),
    element("h2", {}, "Where the time went"),
    ...timeline(run),
    element("h2", {}, "The turns that cost most"),
    dearest(run),
    element("h2", {}, "How the context grows"),
    ...context(run),
    element("h2", {}, "Turns"),
    ...turnTable(run, isOpen),
  );
}

const share = (part, whole) => percent(part / Math.max(1, whole));

function summary(run) {
  const { prompt_tokens: prompt, cached_tokens: cached, read_again_tokens: again, read_again_ns: againNs, written_tokens: written } = run;
  const readAgain = again ? `${count(again)} read again in ${duration(againNs / 1e9)}` : "none read again";
  const of = (ns) => `${share(ns, run.duration_ns)} of ${duration(run.duration_ns / 1e9)}`;
  const agents = run.num_agents > 1 ? `${run.num_agents} agents or conversations` : "one agent";
  return tiles([
    ["Turns", count(run.num_turns), run.num_dropped ? `the last ${count(run.turns.length)} are shown` : agents],
    ["Model", duration(run.model_ns / 1e9), of(run.model_ns)],
    ["Tools", duration(run.tools_ns / 1e9), of(run.tools_ns)],
    ["User", duration(run.user_ns / 1e9), of(run.user_ns)],
    ["Read", count(prompt - cached), `${share(cached, prompt)} of ${count(prompt)} reused, ${readAgain}, ${count(written)} written to the cache`],
    ["Answers", count(run.completion_tokens), `${share(run.tool_result_tokens, prompt)} of the prompts are results of tools`],
  ]);
}

// Returns the sentences on the turns that read most again, with cause and cost, each with a link to its turn.
function readAgain(run) {
  const turns = run.turns.map(({ turn }, index) => ({ turn, number: run.num_dropped + index + 1 }));
  const found = turns.filter(({ turn }) => turn.read_again_explanation).sort((a, b) => b.turn.read_again_tokens - a.turn.read_again_tokens);
  if (!found.length) return [];
  const ids = turns.map(({ turn }) => turn.request_id);
  const sentences = found.slice(0, MOST_SENTENCES).map(({ turn, number }) => {
    const link = element("a", { href: pageOf(turn.request_id), title: turn.request_id }, `Turn ${number}`);
    return element("p", {}, link, ": ", ...linked(turn.read_again_explanation, ids));
  });
  const more = found.length - sentences.length;
  return [element("div", { class: "card why" }, ...sentences, ...(more ? [element("p", { class: "note" }, `${count(more)} more turns read parts again.`)] : []))];
}

function laneName(run, lane) {
  const isSubagent = (each) => each.startsWith("agent_");
  const alike = run.lanes.filter((each) => isSubagent(each) === isSubagent(lane));
  const kind = isSubagent(lane) ? "Subagent" : alike.length === 1 ? "Agent" : "Conversation";
  return alike.length === 1 ? kind : `${kind} ${alike.indexOf(lane) + 1}`;
}

const laneOf = ({ turn }) => turn.agent || turn.thread;

// Returns a row for each agent on one time axis, without long waits for the user.
function timeline(run) {
  const at = (ns) => (ns - run.started_unix_ns) * MS;
  const spans = run.turns.flatMap(({ turn, gap }) => {
    const from = at(turn.started_unix_ns);
    const model = [from, from + turn.duration_ns * MS];
    return gap?.kind === "tools" ? [[from - gap.duration_ns * MS, from], model] : [model];
  });
  const axis = new Axis(spans, (ms) => (ms ? `+${duration(ms / 1000)}` : "0"));
  const ticks = axis.ticks(0.8 * Math.min(innerWidth, 1200)).filter(({ text, isCut }) => text || isCut);
  const lines = ticks.map(({ at: place, isCut }) => `linear-gradient(var(--${isCut ? "control-line" : "grid"}) 0 0) ${100 * place}% 0 / 1px 100% no-repeat`);
  const rows = run.lanes.map((lane) => {
    const track = element("div", { class: "track", "aria-hidden": "true" });
    const bars = run.turns.filter((each) => laneOf(each) === lane).flatMap(({ turn, gap }) => {
      const from = at(turn.started_unix_ns);
      const before = gap?.kind === "tools" ? [["tools", from - gap.duration_ns * MS, from]] : [];
      return [...before, ...phaseSpans(from, turn.phases)];
    });
    placeBar(track, bars.filter(([, from, to]) => axis.share(to) - axis.share(from) >= LEAST_SHARE), axis);
    track.style.setProperty("--lines", lines.join(", "));
    return element("div", { class: "lane" }, element("span", {}, laneName(run, lane)), track);
  });
  const heads = element("div", { class: "track axis", "aria-hidden": "true" }, ...tickLabels(ticks.filter(({ text }) => text)));
  const names = phasesFor(run.turns.flatMap(({ turn }) => turn.phases));
  const phases = ["tools", ...names].map((name) => element("li", {}, element("i", { class: `phase-${name}` }), words(name)));
  return [
    element("ul", { class: "legend", "aria-label": "Parts of the time line" }, ...phases),
    ...(run.turns.some(({ turn }) => turn.phases.some(([, , alone]) => alone !== undefined)) ? [sharedLegend(names === PASSED_PHASES)] : []),
    element("div", {}, element("div", { class: "lane" }, element("span", {}), heads), ...rows),
    ...(run.user_ns ? [element("p", { class: "note" }, "Long waits for the user are cut out, and shorter ones are empty.")] : []),
  ];
}

function dearest(run) {
  const items = run.dearest.map((id) => {
    const number = run.turns.findIndex(({ turn }) => turn.request_id === id);
    const { turn } = run.turns[number];
    const text = `Turn ${run.num_dropped + number + 1}`;
    const read = `${duration(turn.duration_ns / 1e9)}: ${count(turn.prompt_tokens - turn.cached_tokens)} tokens read, ${count(turn.completion_tokens)} written`;
    const again = turn.read_again_tokens ? `, ${count(turn.read_again_tokens)} read again (${words(turn.read_again_reason ?? "")})` : "";
    return element("li", {}, element("a", { href: pageOf(id), title: id }, text), `, ${read}${again}`);
  });
  return element("ol", { class: "dearest" }, ...items);
}

// Returns a column for each prompt of the agent with the most turns.
function context(run) {
  const turns = run.turns.filter((each) => laneOf(each) === run.lanes[0]);
  const most = Math.max(...turns.map(({ turn }) => turn.prompt_tokens), 1);
  const columns = turns.map(({ turn, context_tokens: tokens }) => {
    const parts = PARTS.filter((part) => tokens[part]).map((part) => {
      const piece = element("i", { class: `part-${part}` });
      piece.style.flex = `${tokens[part]} 0 0`;
      return piece;
    });
    const column = element("i", {}, ...parts);
    column.style.height = `${(100 * turn.prompt_tokens) / most}%`;
    return column;
  });
  const used = PARTS.filter((part) => turns.some(({ context_tokens: tokens }) => tokens[part]));
  const { turn: last, context_tokens: tokens } = turns.at(-1);
  const largest = turns.slice(1).reduce((a, b) => (b.new_tokens > (a?.new_tokens ?? 0) ? b : a), null);
  const grew = largest && ` It grew most before turn ${run.num_dropped + run.turns.indexOf(largest) + 1}, by ${count(largest.new_tokens)} tokens.`;
  const text = `The last prompt has ${count(last.prompt_tokens)} tokens, of which ${share(tokens.tool_results ?? 0, last.prompt_tokens)} are results of tools.${grew ?? ""}`;
  return [
    element("p", {}, text),
    element("ul", { class: "legend", "aria-label": "Parts of the prompts" }, ...used.map((part) => element("li", {}, element("i", { class: `part-${part}` }), PART_NAMES[part] ?? words(part)))),
    element("div", { class: "context", role: "img", "aria-label": `Prompts of ${turns.length} turns, of at most ${count(most)} tokens` }, ...columns),
  ];
}

function turnTable(run, isOpen) {
  const heads = [["Turn"], ["Agent", "more"], ["Before it"], ["Took", "number"], ["Prompt", "number more"], ["Reused", "number"], ["Read again", "number more"], ["Written to cache", "number more"], ["Answer", "number"]];
  const rows = run.turns.map((each, index) => {
    const { turn, gap } = each;
    const more = (text) => element("td", { class: "number more" }, text);
    const link = element("a", { href: pageOf(turn.request_id), title: turn.request_id }, `${run.num_dropped + index + 1}`);
    return element(
      "tr",
      {},
      element("td", {}, link, ...(turn.outcome === "finished" ? [] : [` ${turn.outcome}`])),
      element("td", { class: "more" }, laneName(run, laneOf(each))),
      element("td", {}, gap ? `${gap.kind} ${duration(gap.duration_ns / 1e9)}` : "–"),
      numberCell(duration(turn.duration_ns / 1e9)),
      more(count(turn.prompt_tokens)),
      numberCell(count(turn.cached_tokens)),
      more(count(turn.read_again_tokens)),
      more(count(turn.written_tokens)),
      numberCell(count(turn.completion_tokens)),
    );
  });
  const whole = element("div", { class: "turns" }, table(heads, rows));
  if (rows.length <= MOST_TURNS) return [whole];
  const folded = element("details", {}, element("summary", {}, `All ${count(rows.length)}`), whole);
  folded.open = isOpen;
  return [folded];
}

// A link could not send the key.
async function save() {
  const response = await request(`debug/runs/${path}?form=perfetto`);
  saveAs(`${path}.json`, await response.blob());
}

byId("title").textContent = path;
document.title = `${path} · oaiserve`;
byId("save").addEventListener("click", () => save().catch((error) => showProblem(error.message)));
keepLoading(() => textOrRefusal(`debug/runs/${path}`), show);
