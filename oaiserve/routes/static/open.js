// Shows open requests: their progress, their forecasts, and the current estimates.

import { count, duration, element, words } from "./show.js";

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

// Returns the interval that was promised to an open request, of its end or else of its first token, or undefined.
export function promisedOf({ forecast: f, end_now_ns: end, first_token_now_ns: first }) {
  if (f.end_high_ns) return { name: "end", low: f.end_low_ns, median: f.end_ns, high: f.end_high_ns, now: end };
  if (!f.is_calibrated) return undefined;
  return { name: "first token", low: f.first_token_low_ns, median: f.first_token_ns, high: f.first_token_high_ns, now: first };
}

// Returns a bar of the elapsed time against the forecast: the promised interval of the end is shaded, with a line at
// its median; of the first token, if no end is promised, until it is there. Without a forecast, the bar fills as the
// prompt is computed, and is full from the first token on.
export function openBar(entry) {
  const { elapsed_ns: elapsed } = entry;
  const track = element("span", { class: "track", "aria-hidden": "true" });
  const place = (name, from, to, whole) => {
    const part = track.appendChild(element("i", { class: name }));
    part.style.left = `${(100 * from) / whole}%`;
    part.style.width = `${(100 * (to - from)) / whole}%`;
  };
  const isWritten = entry.phase === "decode" || entry.phase === "respond";
  const promised = promisedOf(entry);
  if (!promised || (promised.name === "first token" && isWritten)) {
    const share = promptShare(entry);
    if (isWritten) place("phase-decode", 0, 1, 1);
    else if (share) place("phase-prefill", 0, share, 1);
    return track;
  }
  const whole = Math.max(elapsed, promised.now ?? 0, promised.high);
  place("promised", promised.low, promised.high, whole);
  place("median", promised.median, promised.median, whole);
  place(elapsed > promised.high ? "late" : "elapsed", 0, elapsed, whole);
  return track;
}

// Returns the parts of a row that differ from those of an ended request.
export function openParts(entry) {
  const promised = promisedOf(entry);
  const now = promised?.now ? `, now ${duration(promised.now / 1e9)}` : "";
  const title = promised ? `${promised.name} due after ${duration(promised.median / 1e9)}${now}` : "";
  return {
    outcome: element("span", { class: "outcome-open", title }, entry.phase === "queue" ? "waiting" : "running"),
    tokens: element("span", { class: "quiet tokens progress" }, progressOf(entry)),
    track: openBar(entry),
    time: entry.elapsed_ns,
  };
}
