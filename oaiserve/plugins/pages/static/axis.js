// The time axis of the waterfall: the position of each moment, and the ticks. It does not know the page.

import { tick } from "./show.js";

const LONGEST_IDLE = 0.05; // a longer idle time is cut to this share of the busy time
const PIXELS_PER_TICK = 110;
const PIXELS_OF_LABEL = 64;

// An axis for `spans`, pairs of a start and an end in ms. Idle times between spans are cut short, so that requests that
// arrive minutes apart fit on it. `label` returns the text for the moment at which a stretch without a cut begins.
export class Axis {
  constructor(spans, label) {
    const ordered = [...spans].sort((a, b) => a[0] - b[0]);
    const busy = merged(ordered, 0).reduce((sum, { from, to }) => sum + to - from, 0);
    const idle = busy * LONGEST_IDLE;
    this.label = label;
    this.stretches = merged(ordered, idle);
    this.length = -idle;
    for (const stretch of this.stretches) {
      stretch.at = this.length + idle;
      this.length = stretch.at + stretch.to - stretch.from;
    }
  }

  get from() {
    return this.stretches[0].from;
  }

  get to() {
    return this.stretches.at(-1).to;
  }

  // Returns the position of a moment, from 0 at the left end to 1. A moment in a cut is at the end of the cut.
  share(ms) {
    const stretch = this.stretches.find(({ to }) => ms <= to) ?? this.stretches.at(-1);
    return (stretch.at + Math.min(Math.max(ms, stretch.from), stretch.to) - stretch.from) / (this.length || 1);
  }

  // Returns ticks for the start of each stretch and for round times after it: `at` (0 to 1), `isCut`, and `text`, which
  // is empty if it has no room.
  ticks(pixels) {
    const room = PIXELS_OF_LABEL / pixels;
    const step = niceStep((this.length * PIXELS_PER_TICK) / pixels);
    const texts = [];
    const found = [];
    const add = (at, isCut, text) => {
      const hasRoom = at <= 1 - room && texts.every((other) => Math.abs(other - at) >= room);
      if (hasRoom) texts.push(at);
      if (hasRoom || isCut) found.push({ at, isCut, text: hasRoom ? text : "" });
      return hasRoom;
    };
    const [first, ...others] = this.stretches;
    others.sort((a, b) => b.to - b.from - (a.to - a.from)); // the longest stretches get their text first
    const named = [first, ...others].filter((part) => add(this.share(part.from), part !== first, this.label(part.from)));
    for (const { from, to } of named) {
      for (let ms = step; ms <= to - from; ms += step) add(this.share(from + ms), false, tick(ms));
    }
    return found;
  }
}

// Returns the spans as {from, to}. Spans that are at most `gap` apart become one.
function merged(ordered, gap) {
  const found = [];
  for (const [from, to] of ordered) {
    const last = found.at(-1);
    if (last && from - last.to <= gap) last.to = Math.max(last.to, to);
    else found.push({ from, to });
  }
  return found;
}

// Returns the smallest number that is 1, 2 or 5 times a power of ten and at least `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9));
}
