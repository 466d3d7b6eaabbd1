// Lists the last runs of agents, and updates the list while the page is visible.

import { keepLoading } from "./page.js";
import { showRows } from "./rows.js";
import { readingOf, stateOf } from "./run_state.js";
import { byId, clock, count, duration, element } from "./show.js";
import { requestJson, runPageOf } from "./sse.js";

const EVERY_MS = 2000;
const list = element("ol");
const none = element("p", { class: "note", hidden: "" }, "No runs yet. A run appears when an agent sends its session in a header, or goes on from an answer.");
byId("runs").append(list, none);

function show({ runs }) {
  none.hidden = runs.length > 0;
  showRows(list, runs.map((run) => Object.assign(element("li", {}, rowOf(run)), { key: run.run_id })));
  return EVERY_MS;
}

function rowOf(run) {
  const { num_turns: turns, num_agents: agents, prompt_tokens: prompt, is_live: isLive } = run;
  const track = element("span", { class: "track", "aria-hidden": "true" });
  for (const [name, ns] of [["decode", run.model_ns], ["tools", run.tools_ns], ["user", run.user_ns]]) {
    track.append(element("i", { class: `phase-${name}` }));
    track.lastChild.style.flex = `${ns} 0 0`;
  }
  return element(
    "a",
    { href: runPageOf(run.run_id), title: run.run_id },
    element("span", { class: "quiet" }, clock(run.started_unix_ns / 1e6), element("span", { class: isLive ? "is-live" : "" }, stateOf(run))),
    element("span", { title: run.first_words }, run.program || run.first_words || "unknown program", element("span", { class: "quiet" }, run.model.split("/").at(-1))),
    element("span", {}, `${count(turns)} ${turns === 1 ? "turn" : "turns"}${agents > 1 ? `, ${agents} agents` : ""}`, ...wordsOf(run)),
    element("span", { class: "quiet" }, `${count(prompt)} tokens`, element("span", {}, readingOf(run))),
    track,
    element("span", { class: "took" }, duration(run.duration_ns / 1e9)),
  );
}

// Returns the first words of the run's user, if the page may show them and they are not its name.
function wordsOf({ program, first_words: words }) {
  return program && words ? [element("span", { class: "quiet" }, words)] : [];
}

keepLoading(() => requestJson("debug/runs"), show);
