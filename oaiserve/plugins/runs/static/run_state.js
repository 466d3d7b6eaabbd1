// Says whether a run has an open request or waits for its tools, or how long ago the last request ended. No client says
// that its run has ended.

import { count, duration, percent } from "./show.js";

export function stateOf({ num_open: open, awaits_tools: awaitsTools = false, silent_ns: ns = 0 }) {
  if (open) return "running";
  return awaitsTools ? "waiting for its tools" : `last request ${ago(ns / 1e9)}`;
}

// Returns what a run read again, with its price, or how much of its prompts it reused.
export function readingOf({ prompt_tokens: prompt, cached_tokens: cached, read_again_tokens: again, read_again_ns: ns = 0 }) {
  if (!again) return `${percent(cached / Math.max(1, prompt))} reused`;
  return `${count(again)} read again, ${duration(ns / 1e9)}`;
}

// By the minute, so that the text stays the same for a while.
function ago(seconds) {
  if (seconds < 60) return "less than a minute ago";
  return seconds < 5400 ? `${Math.floor(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}
