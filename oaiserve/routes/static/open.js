// Shows the open requests, each with a bar that fills against its forecast: the promised interval of its end is shaded,
// the line in it is the median, and what it looks like now is beside it.

import { byId, clock, duration, element, words } from "./show.js";

export function showOpen(requests) {
  byId("open").hidden = requests.length === 0;
  byId("open-requests").replaceChildren(...requests.map((entry) => element("li", {}, openRow(entry))));
}

function openRow(entry) {
  const { forecast, elapsed_ns: elapsed, end_now_ns: end } = entry;
  const whole = Math.max(elapsed, end ?? 0, forecast.end_high_ns ?? 0);
  const track = element("span", { class: "track", "aria-hidden": "true" });
  const place = (name, from, to) => {
    const part = track.appendChild(element("i", { class: name }));
    part.style.left = `${(100 * from) / whole}%`;
    part.style.width = `${(100 * (to - from)) / whole}%`;
  };
  if (forecast.is_calibrated) {
    place("promised", forecast.end_low_ns, forecast.end_high_ns);
    place("median", forecast.end_ns, forecast.end_ns);
  }
  place(elapsed > (forecast.end_high_ns ?? Infinity) ? "late" : "elapsed", 0, elapsed);
  const told = forecast.is_calibrated ? `promised ${duration(forecast.end_ns / 1e9)}` : "calibrating";
  return element(
    "div",
    { class: "row" },
    element("span", { class: "quiet" }, clock(entry.received_unix_ns / 1e6)),
    element("span", { class: "id" }, entry.request_id),
    element("span", { class: "quiet" }, told),
    element("span", { class: "quiet tokens" }, progress(entry)),
    track,
    element("span", { class: "duration" }, duration((end ?? elapsed) / 1e9)),
  );
}

function progress(entry) {
  const { completion_tokens: answer, computed_prompt_tokens: computed, prompt_tokens: prompt } = entry;
  if (answer) return `${answer} tokens`;
  const count = (number) => number.toLocaleString("en-US");
  return prompt && computed ? `${count(computed)} of ${count(prompt)} prompt tokens` : words(entry.phase);
}
