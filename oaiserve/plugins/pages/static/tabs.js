// Shows an answer in every tab of this browser that has its conversation open, while one of them receives it. The others
// ask that tab again and again for what is new, so that nothing is sent while nobody looks.

import { isLasting } from "./storage.js";

const ASK_MS = 200;
const MOST_UNANSWERED = 10; // questions after which the tab that received the answer is gone

// Returns the last steps of a conversation's last answers that another tab may be receiving, or was when it was killed.
export function stepsElsewhere({ turns }) {
  const steps = turns.at(-1)?.answers.map((answer) => answer.steps.at(-1)) ?? [];
  return steps.filter((step) => step?.isElsewhere);
}

export class Tabs {
  #channel = isLasting ? new BroadcastChannel("oaiserve-chat") : null;
  #page;
  #timer = null;
  #numUnanswered = 0;

  // `page` has the conversation `open`, `receiving(id)`, which returns a conversation of which this tab receives answers,
  // `receives(answer)`, `stopReceiving(id)`, and `drawElsewhere(hasEnded)`.
  constructor(page) {
    this.#page = page;
    this.#channel?.addEventListener("message", ({ data }) => this.#hear(data));
  }

  // Takes the steps of the open conversation that another tab may be receiving as open, and begins to ask for them.
  look() {
    if (this.#channel === null) return;
    const steps = stepsElsewhere(this.#page.open);
    for (const step of steps.filter(({ isCut }) => isCut)) {
      delete step.isCut;
      Object.assign(step, { isOpen: true, sentMs: performance.now() });
    }
    this.#numUnanswered = 0;
    if (!steps.length) return;
    this.#timer ??= setInterval(() => this.#ask(), ASK_MS);
    this.#ask();
  }

  // Stops the answers of a conversation in the tab that receives them.
  stop({ id }) {
    this.#channel?.postMessage({ kind: "stop", id });
  }

  #ask() {
    const { id, turns } = this.#page.open;
    const steps = stepsElsewhere(this.#page.open);
    if (steps.length && this.#numUnanswered < MOST_UNANSWERED) {
      this.#numUnanswered += 1;
      const has = turns.at(-1).answers.map((answer) => [answer.steps.length, ...lengths(answer.steps.at(-1))]);
      this.#channel.postMessage({ kind: "ask", id, has });
      return;
    }
    this.#timer = clearInterval(this.#timer);
    for (const step of steps) {
      delete step.isElsewhere;
      if (step.isOpen) Object.assign(step, { isOpen: false, isCut: true });
    }
    if (steps.length) this.#page.drawElsewhere(true);
  }

  #hear({ kind, id, ...data }) {
    if (kind === "stop") this.#page.stopReceiving(id);
    if (kind === "ask") this.#reply(id, data.has);
    if (kind === "reply" && id === this.#page.open.id) this.#take(data);
  }

  #reply(id, has) {
    const conversation = this.#page.receiving(id);
    if (!conversation) return;
    const { answers } = conversation.turns.at(-1);
    const parts = answers.flatMap((answer, place) => {
      if (!this.#page.receives(answer)) return [];
      const number = answer.steps.length;
      const { tokens, eventsMs, ...step } = answer.steps.at(-1);
      const [knownNumber, ...known] = has[place] ?? [];
      const [numTokens, numEvents] = knownNumber === number ? known : [0, 0];
      return [{ place, number, step, tokens: [numTokens, tokens.slice(numTokens)], eventsMs: [numEvents, eventsMs.slice(numEvents)] }];
    });
    const originMs = performance.timeOrigin; // of all times in the steps
    this.#channel.postMessage({ kind: "reply", id, originMs, numTurns: conversation.turns.length, parts });
  }

  #take({ originMs, numTurns, parts }) {
    const { turns } = this.#page.open;
    const laterMs = originMs - performance.timeOrigin;
    if (!stepsElsewhere(this.#page.open).length || numTurns !== turns.length) return; // the storage has what is missing
    this.#numUnanswered = 0;
    for (const { place, number, step, tokens, eventsMs } of parts) {
      const mine = turns.at(-1).answers[place]?.steps[number - 1];
      if (!mine?.isElsewhere) continue;
      Object.assign(mine, step, { isElsewhere: true, sentMs: step.sentMs + laterMs });
      if (step.progress) mine.progress = { ...step.progress, atMs: step.progress.atMs + laterMs };
      else delete mine.progress;
      append(mine.tokens, tokens);
      append(mine.eventsMs, eventsMs);
    }
    this.#page.drawElsewhere(false);
  }
}

const lengths = (step) => [step?.tokens.length ?? 0, step?.eventsMs.length ?? 0];

// Puts entries into a list from a place on, unless entries before it are missing.
function append(list, [from, entries]) {
  if (from <= list.length) list.splice(from, Infinity, ...entries);
}
