// Shows the tokens of an answer by what each cost or how sure the model was, and where two answers part.

import { duration, element, percent } from "./show.js";

// A step that a token is above gives its shade, from the usual to the most unusual: of its time in relation to the
// usual one, and of the probability that it had.
export const VIEWS = {
  cost: { bounds: [1.25, 1.75, 2.5, 5], says: ["as usual", "1.25 times as long", "1.75", "2.5", "5 times and more"] },
  certainty: { bounds: [0.1, 0.3, 0.5, 0.75], says: ["90 % sure or more", "70 to 90 %", "50 to 70 %", "25 to 50 %", "less"] },
};

export function legend(view) {
  const { says } = VIEWS[view];
  return says.map((text, shade) => element("li", {}, element("span", { class: `shade-${shade}` }, "token"), ` ${text}`));
}

// Returns the tokens of a step as elements. The one at character `partsAt` is marked.
export function shown(step, view, partsAt) {
  const gaps = step.eventsMs.map((ms, event) => ms - (step.eventsMs[event - 1] ?? 0));
  const numTokens = gaps.map(() => 0);
  for (const [, event] of step.tokens) numTokens[event]++;
  const usual = gaps.slice(1).toSorted((a, b) => a - b)[Math.floor((gaps.length - 1) / 2)] || 1;
  let at = 0;
  return step.tokens.map(([text, event, logprob]) => {
    const probability = logprob === null ? null : Math.exp(logprob);
    const isFirst = event === 0; // whose time is that of the prompt
    const value = view === "cost" ? (isFirst ? 0 : gaps[event] / usual) : 1 - (probability ?? 1);
    const others = numTokens[event] - 1;
    const time = `${duration(gaps[event] / 1e3)}${isFirst ? " to the first token" : ""}`;
    const title = `${time}${others ? `, with ${others} more` : ""}${probability === null ? "" : `; ${percent(probability)} sure`}`;
    const isPart = partsAt !== null && at <= partsAt && partsAt < at + text.length;
    at += text.length;
    return element("span", { class: `shade-${shade(value, VIEWS[view].bounds)}${isPart ? " parts" : ""}`, title }, text);
  });
}

function shade(value, bounds) {
  return bounds.filter((bound) => value > bound).length;
}

// Compares two steps by the characters of their tokens. Returns null if they are the same, or else where they part: the
// character, the number of tokens before it, and the token there of each, which is undefined where one has ended.
export function parting(one, other) {
  const [a, b] = [one, other].map(({ tokens }) => tokens.map(([text]) => text).join(""));
  let at = 0;
  while (at < a.length && a[at] === b[at]) at++;
  if (at === a.length && at === b.length) return null;
  return { at, numTokens: position(one, at), tokens: [one, other].map((step) => step.tokens[position(step, at)]) };
}

// Returns the number of tokens that are whole before a character.
function position({ tokens }, at) {
  let [number, length] = [0, 0];
  while (number < tokens.length && length + tokens[number][0].length <= at) length += tokens[number++][0].length;
  return number;
}

export function partingSentence(found) {
  if (found === null) return "It is the same as the first, token by token.";
  const [first, own] = found.tokens.map((token) => (token ? `“${token[0]}”${sure(token[2])}` : "its end"));
  const { numTokens } = found;
  const place = numTokens ? `after ${numTokens} ${numTokens === 1 ? "token" : "tokens"}` : "at once";
  return `It parts from the first ${place}: ${own}, and there ${first}.`;
}

function sure(logprob) {
  return logprob === null ? "" : ` (${percent(Math.exp(logprob))})`;
}
