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

// Returns a bar of the elapsed time against the forecast: the promised interval of the end is shaded, with a line at
// its median. Without a forecast, the bar fills as the prompt is computed, and is full from the first token on.
export function openBar(entry) {
  const { forecast, elapsed_ns: elapsed } = entry;
  const track = element("span", { class: "track", "aria-hidden": "true" });
  const place = (name, from, to, whole) => {
    const part = track.appendChild(element("i", { class: name }));
    part.style.left = `${(100 * from) / whole}%`;
    part.style.width = `${(100 * (to - from)) / whole}%`;
  };
  if (!forecast.is_calibrated) {
    const share = promptShare(entry);
    if (entry.phase === "decode" || entry.phase === "respond") place("phase-decode", 0, 1, 1);
    else if (share) place("phase-prefill", 0, share, 1);
    return track;
  }
  const whole = Math.max(elapsed, entry.end_now_ns ?? 0, forecast.end_high_ns);
  place("promised", forecast.end_low_ns, forecast.end_high_ns, whole);
  place("median", forecast.end_ns, forecast.end_ns, whole);
  place(elapsed > forecast.end_high_ns ? "late" : "elapsed", 0, elapsed, whole);
  return track;
}

// Returns the parts of a row that differ from those of an ended request.
export function openParts(entry) {
  const { forecast, end_now_ns: end } = entry;
  const promised = forecast.is_calibrated ? `due after ${duration(forecast.end_ns / 1e9)}${end ? `, now ${duration(end / 1e9)}` : ""}` : "";
  return {
    outcome: element("span", { class: "outcome-open", title: promised }, entry.phase === "queue" ? "waiting" : "running"),
    tokens: element("span", { class: "quiet tokens progress" }, progressOf(entry)),
    track: openBar(entry),
    time: entry.elapsed_ns,
  };
}
