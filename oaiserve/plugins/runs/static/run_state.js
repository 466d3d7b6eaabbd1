// Says whether a run has an open request, or how long ago the last one ended. No client says that its run has ended.

export function stateOf({ num_open: open, silent_ns: ns = 0 }) {
  return open ? "running" : `last request ${ago(ns / 1e9)}`;
}

// By the minute, so that the text stays the same for a while.
function ago(seconds) {
  if (seconds < 60) return "less than a minute ago";
  return seconds < 5400 ? `${Math.floor(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}
