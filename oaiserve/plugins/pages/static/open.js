// Shows open requests and their progress.

import { count, element, words } from "./show.js";

// Returns the progress of an open request in a few words.
export function progressOf({ phase, prompt_tokens: prompt, computed_prompt_tokens: computed, completion_tokens: written }) {
  if (phase === "prefill" && prompt) return `${count(computed)} of ${count(prompt)} read`;
  if (phase === "decode") return `${count(written)} ${written === 1 ? "token" : "tokens"} so far`;
  return { queue: "waiting in the queue", receive: "receiving the request", respond: "sending the end" }[phase] ?? words(phase);
}

// Returns the computed share of the prompt, from 0 to 1.
export function promptShare({ prompt_tokens: prompt, computed_prompt_tokens: computed }) {
  return prompt ? computed / prompt : 0;
}

// Returns a bar that fills as the prompt is computed, and is full from the first token on.
function openBar(entry) {
  const track = element("span", { class: "track", "aria-hidden": "true" });
  const isWritten = entry.phase === "decode" || entry.phase === "respond";
  const share = isWritten ? 1 : promptShare(entry);
  if (share) {
    const part = track.appendChild(element("i", { class: isWritten ? "phase-decode" : "phase-prefill" }));
    part.style.left = "0%";
    part.style.width = `${100 * share}%`;
  }
  return track;
}

// Returns the parts of a row that differ from those of an ended request.
export function openParts(entry) {
  return {
    outcome: element("span", { class: "outcome-open" }, entry.phase === "queue" ? "waiting" : "running"),
    tokens: element("span", { class: "quiet tokens progress" }, progressOf(entry)),
    track: openBar(entry),
    time: entry.elapsed_ns,
  };
}
