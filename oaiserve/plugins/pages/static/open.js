// Shows open requests and their progress.

import { isAloneUnknown } from "./shades.js";
import { count, duration, element, words } from "./show.js";

// Returns the progress of an open request in a few words.
export function progressOf({ phase, prompt_tokens: prompt, computed_prompt_tokens: computed, completion_tokens: written }) {
  if (phase === "prefill" && prompt) return `${count(computed)} of ${count(prompt)} read`;
  if (phase === "decode") return `${count(written)} ${written === 1 ? "token" : "tokens"} so far`;
  return { first_byte: "waiting for the engine", stream: "being written", queue: "waiting in the queue", receive: "receiving the request", respond: "sending the end" }[phase] ?? words(phase);
}

const REASONS = {
  step_under_way: "the end of the step that is running",
  batch_full: "a place among those that run",
  token_budget: "room in a step beside other prompts",
  no_blocks: "room in the KV cache",
  behind_others: "earlier requests, which wait for room in the KV cache",
  same_prefix: "another request that computes the same prefix",
  prefix_read: "its prefix, which is read from the disk",
  prefix_restored: "its prefix, which is restored from host memory",
  foreground: "others, because it is background work",
};

const KINDS = { prompts_ns: "prompts", decodes_ns: "answers", media_ns: "images and sounds" };

// Returns whose requests others were: with the name of their key, unless they have none or are beyond the first few.
export function ownerOf(whose, client) {
  if (whose === "same_client") return "other requests of the same client";
  return client === "other" ? "further clients" : (client ?? "other clients");
}

// Returns whose requests most of a phase went to, and the time that they took.
function othersSoFar(phase, [largest]) {
  if (!largest) return [];
  const { whose, client, ...times } = largest;
  const kind = Object.keys(KINDS).reduce((most, name) => (times[name] > times[most] ? name : most));
  const ns = Object.values(times).reduce((sum, each) => sum + each, 0);
  return [`${duration(ns / 1e9)} in ${words(phase)} went to ${KINDS[kind]} of ${ownerOf(whose, client)}.`];
}

// Returns sentences on what an open request waits for, how long it will still take, and what took its time so far.
export function sentencesOf({ phase, phases, waits_for: reason, prompt_left_ns: promptNs, answer_left_ns: answerNs }) {
  const { causes_ns: causes = {}, others = [] } = phases.at(-1);
  const left = promptNs ? [`Its first token comes in about ${duration(promptNs / 1e9)}.`] : answerNs ? [`It ends in ${duration(answerNs / 1e9)} or earlier.`] : [];
  const parts = Object.entries(causes).map(([name, ns]) => `${words(name)} ${duration(ns / 1e9)}`);
  const alone = isAloneUnknown(causes) ? ["what it takes alone is not known yet"] : [];
  return [
    ...(reason ? [`It waits for ${REASONS[reason] ?? words(reason)}.`] : []),
    ...left,
    ...(parts.length ? [`So far in ${words(phase)}: ${[...parts, ...alone].join(", ")}.`] : []),
    ...othersSoFar(phase, others),
  ];
}

// Returns the computed share of the prompt, from 0 to 1.
export function promptShare({ prompt_tokens: prompt, computed_prompt_tokens: computed }) {
  return prompt ? computed / prompt : 0;
}

// Returns the parts of a row that differ from those of an ended request.
export function openParts(entry) {
  return {
    outcome: element("span", { class: "outcome-open" }, entry.phase === "queue" ? "waiting" : "running"),
    tokens: element("span", { class: "quiet tokens progress" }, progressOf(entry)),
    track: element("span", { class: "track", "aria-hidden": "true" }),
    time: entry.elapsed_ns,
  };
}
