// Shades the tokens of an answer by their time or their probability, and finds where two answers differ.

import { duration, element, percent } from "./show.js";

// The number of bounds below a token's value gives its shade. The value is its time divided by the usual time, or 1
// minus its probability.
export const VIEWS = {
  cost: { bounds: [1.25, 1.75, 2.5, 5], says: ["usual time", "over 1.25 times", "over 1.75", "over 2.5", "over 5 times"] },
  certainty: { bounds: [0.1, 0.3, 0.5, 0.75], says: ["90 % sure or more", "70 to 90 %", "50 to 70 %", "25 to 50 %", "less"] },
};
const FARTHEST = 120; // most characters of Markdown syntax between two shown characters

export function legend(view) {
  const { says } = VIEWS[view];
  return says.map((text, shade) => element("li", {}, element("span", { class: `shade-${shade}` }, "token"), ` ${text}`));
}

// Shades the text of elements, given as pairs of an element and the place of its source in the tokens' text,
// [from, to]. The shown text is the source without the marks of Markdown. The token at `partsAt` is framed.
export function shadeTokens(step, view, pairs, partsAt) {
  const marks = marksOf(step, view, partsAt);
  const source = step.tokens.map(([text]) => text).join("");
  const tokenAt = step.tokens.flatMap(([text], number) => new Array(text.length).fill(number));
  for (const [box, [from, to]] of pairs) {
    let at = from;
    for (const node of textsIn(box)) {
      const parts = []; // [text, number of its token]
      for (const character of node.data) {
        const found = place(source, character, at, to);
        const number = found < 0 ? undefined : tokenAt[found];
        if (found >= 0) at = found + character.length;
        if (parts.length && parts.at(-1)[1] === number) parts.at(-1)[0] += character;
        else parts.push([character, number]);
      }
      node.replaceWith(...parts.map(([text, number]) => (number === undefined ? text : element("span", { ...marks[number], "data-token": number }, text))));
    }
  }
}

// Returns the place of a shown character in the source from `at` on, or -1. Some shown white space has no source.
function place(source, character, at, to) {
  if (/\s/.test(character)) return /\s/.test(source[at] ?? "") ? at : -1;
  const found = source.slice(at, Math.min(to, at + FARTHEST)).indexOf(character);
  return found < 0 ? -1 : at + found;
}

function textsIn(box) {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
}

// Returns the class and the title of each token.
function marksOf(step, view, partsAt) {
  const gaps = step.eventsMs.map((ms, event) => ms - (step.eventsMs[event - 1] ?? 0));
  const numTokens = gaps.map(() => 0);
  for (const [, event] of step.tokens) numTokens[event]++;
  const usual = gaps.slice(1).toSorted((a, b) => a - b)[Math.floor((gaps.length - 1) / 2)] || 1;
  let at = 0;
  return step.tokens.map(([text, event, logprob]) => {
    const probability = logprob === null ? null : Math.exp(logprob);
    const isFirst = event === 0; // its time includes the prompt's
    const value = view === "cost" ? (isFirst ? 0 : gaps[event] / usual) : 1 - (probability ?? 1);
    const others = numTokens[event] - 1;
    const time = `${duration(gaps[event] / 1e3)}${isFirst ? " to the first token" : ""}`;
    const title = `${time}${others ? `, with ${others} more` : ""}${probability === null ? "" : `; ${percent(probability)} sure`}`;
    const isPart = partsAt !== null && at <= partsAt && partsAt < at + text.length;
    at += text.length;
    return { class: `shade-${shade(value, VIEWS[view].bounds)}${isPart ? " parts" : ""}`, title };
  });
}

export function shade(value, bounds) {
  return bounds.filter((bound) => value > bound).length;
}

// Compares two steps by the characters of their tokens. Returns null if they are the same, or else where they differ
// first: the character, the number of tokens before it, and the token there of each, undefined where one has ended.
export function parting(one, other) {
  const [a, b] = [one, other].map(({ tokens }) => tokens.map(([text]) => text).join(""));
  let at = 0;
  while (at < a.length && a[at] === b[at]) at++;
  if (at === a.length && at === b.length) return null;
  return { at, numTokens: position(one, at), tokens: [one, other].map((step) => step.tokens[position(step, at)]) };
}

// Returns the number of tokens that are whole before a character.
function position({ tokens }, at) {
  let number = 0;
  let length = 0;
  while (number < tokens.length && length + tokens[number][0].length <= at) length += tokens[number++][0].length;
  return number;
}

export function partingSentence(found) {
  if (found === null) return "Every token is the same as in the first answer.";
  const [first, own] = found.tokens.map((token) => (token ? `“${token[0]}”${sure(token[2])}` : "the end"));
  const { numTokens } = found;
  const since = numTokens ? `after ${numTokens} ${numTokens === 1 ? "token" : "tokens"}` : "from the first token on";
  return `Differs from the first answer ${since}: ${own} instead of ${first}.`;
}

function sure(logprob) {
  return logprob === null ? "" : ` (${percent(Math.exp(logprob))})`;
}
