// The time axis of the waterfall: where a moment is on it, and what stands at its head. Knows no page.

import { tick } from "./show.js";

const LONGEST_IDLE = 0.05; // of the time in which something went on: a longer rest is cut to that
const PIXELS_PER_TICK = 110;
const PIXELS_OF_LABEL = 64;

// `spans`: pairs of a start and an end in ms. Rests between them are cut short, so that requests which came minutes
// apart can be seen, too. `label` gives the text for the moment at which a stretch without a cut begins.
export class Axis {
  constructor(spans, label) {
    const ordered = [...spans].sort((a, b) => a[0] - b[0]);
    const busy = merged(ordered, 0).reduce((sum, { from, to }) => sum + to - from, 0);
    const rest = busy * LONGEST_IDLE;
    this.label = label;
    this.stretches = merged(ordered, rest);
    this.length = -rest;
    for (const stretch of this.stretches) {
      stretch.at = this.length + rest;
      this.length = stretch.at + stretch.to - stretch.from;
    }
  }

  get from() {
    return this.stretches[0].from;
  }

  get to() {
    return this.stretches.at(-1).to;
  }

  // From 0, its left end, to 1. What is in a cut is at its end.
  share(ms) {
    const stretch = this.stretches.find(({ to }) => ms <= to) ?? this.stretches.at(-1);
    return (stretch.at + Math.min(Math.max(ms, stretch.from), stretch.to) - stretch.from) / (this.length || 1);
  }

  // One where each stretch begins, and round times after it: `at` (0 to 1), `isCut`, and `text`, which is empty where it
  // has no room.
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
    others.sort((a, b) => b.to - b.from - (a.to - a.from)); // a long one needs its text most
    const named = [first, ...others].filter((part) => add(this.share(part.from), part !== first, this.label(part.from)));
    for (const { from, to } of named) {
      for (let ms = step; ms <= to - from; ms += step) add(this.share(from + ms), false, tick(ms));
    }
    return found;
  }
}

// As {from, to}: what is no further than `rest` apart is one.
function merged(ordered, rest) {
  const found = [];
  for (const [from, to] of ordered) {
    const last = found.at(-1);
    if (last && from - last.to <= rest) last.to = Math.max(last.to, to);
    else found.push({ from, to });
  }
  return found;
}

// 1, 2 or 5 times a power of ten: the least that is not below.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9));
}
