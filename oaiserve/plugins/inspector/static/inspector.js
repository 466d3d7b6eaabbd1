// Shows the prompt and the answer of a request as tokens, with the origin, the certainty and the time of each one.

import { choice, count, duration, element, percent, words } from "./show.js";
import { pageOf, requestJson } from "./sse.js";
import { legend, shade, VIEWS } from "./tokens.js";

const BLOCK = 400; // fewest tokens of a block, which ends with a line: the browser lays out only blocks in view
const LONGEST_BLOCK = 2000; // most tokens, if there is no end of a line
const KINDS = { template: "chat template", tools: "tools", media: "images and sounds", text: "text", system: "system", developer: "developer", user: "user", assistant: "assistant", tool: "results of tools" };
const ANSWER_VIEWS = [["text", "Off"], ["certainty", "Certainty"], ["cost", "Time"]];
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 };

// Shows the tokens of a request in a box, or why there are none.
export async function showTokens(box, id, query = {}) {
  let found;
  try {
    found = await fetchTokens(id, query);
  } catch (error) {
    box.replaceChildren(element("p", { class: "card" }, error.message));
    return;
  }
  const again = (changed) => showTokens(box, id, { ...query, ...changed });
  const more = (place) => fetchTokens(id, { ...query, ...place });
  box.replaceChildren(...choices(found, again), ...promptPart(found, more), ...answerPart(found, more));
}

function fetchTokens(id, query) {
  return requestJson(`debug/requests/${encodeURIComponent(id)}/tokens?${new URLSearchParams(query)}`);
}

// Returns what selects one of several prompts and choices.
function choices({ num_prompts: prompts, num_choices: ofEach, prompt_index: prompt, choice_index: choice }, again) {
  const select = (label, number, chosen, name) => {
    if (number < 2) return [];
    const options = Array.from({ length: number }, (_, place) => element("option", { value: place, ...(place === chosen ? { selected: "" } : {}) }, `${place + 1} of ${number}`));
    return [element("label", {}, `${label} `, element("select", { onchange: ({ target }) => again({ [name]: target.value }) }, ...options))];
  };
  const shown = [...select("Prompt", prompts, prompt, "prompt"), ...select("Choice", ofEach, choice, "choice")];
  return shown.length ? [element("p", { class: "which" }, ...shown)] : [];
}

function promptPart({ prompt, compared, is_open: isOpen }, more) {
  const head = element("h3", {}, "Prompt");
  if (!prompt) return [head, element("p", { class: "note" }, isOpen ? "Its tokens are not known yet." : "The server rejected it before it became tokens.")];
  const { num_tokens: number, cached_tokens: cached, runs } = prompt;
  const kinds = (runs ?? []).flatMap(([kind, length]) => new Array(length).fill(kind));
  const used = [...new Set(kinds)];
  const shades = used.map((kind) => element("li", {}, element("span", { class: `kind-${kind}` }, "token"), ` ${KINDS[kind] ?? kind}`));
  const notes = [`${tokensOf(number)}${cached ? `, the first ${count(cached)} of them from the cache` : ""}.`];
  if (!runs) notes.push("It is not known which part the template wrote: it writes something else now, or the tokenizer changes texts.");
  for (const [place, { kind, bytes }] of prompt.media.entries()) notes.push(`${words(kind)} ${place + 1}: ${count(bytes)} bytes.`);
  const changes = compared?.changes ?? [];
  const changeAt = new Map(changes.map((change) => [change.start, change]));
  const isAdded = new Uint8Array(number);
  for (const { start, added_tokens: added } of changes) isAdded.fill(1, start, start + added);
  const list = new TokenList("Tokens of the prompt", prompt, (at) => {
    const kind = kinds[at] ?? "text";
    const says = [KINDS[kind] ?? kind, at < cached ? "from the cache" : "", isAdded[at] ? "not in the earlier prompt" : ""];
    return { class: `kind-${kind}${isAdded[at] ? " added" : ""}`, says, isMedia: kind === "media" };
  });
  list.before = (at) => (changeAt.has(at) ? removedPart(changeAt.get(at)) : []);
  list.more = (start) => more({ prompt_start: start }).then((found) => found.prompt);
  list.add(prompt);
  let next = 0;
  const button = element("button", { type: "button", class: "link" }, changes.length > 1 ? "Show the next difference" : "Show the difference");
  button.addEventListener("click", () => list.goTo(changes[next++ % changes.length].start));
  const goTo = changes.length ? [" ", button] : [];
  return [
    head,
    element("p", { class: "note" }, notes.join(" ")),
    ...(compared ? [element("p", {}, ...comparison(compared), ...goTo)] : []),
    element("ul", { class: "legend", "aria-label": "Origins of tokens" }, ...shades),
    list.element,
  ];
}

// Returns the sentence on the prompt with which this one was compared.
function comparison({ request_id: id, age_ns: ageNs, common_tokens: common, changes }) {
  const to = ["Compared with ", element("a", { href: pageOf(id) }, id), ageNs === null ? "" : `, ${duration(ageNs / 1e9)} before`];
  if (common === null) return [...to, "."];
  const same = `: the first ${tokensOf(common)} are the same`;
  if (!changes) return [...to, `${same}. The earlier prompt is not kept any more.`];
  if (!changes.length) return [...to, ": both are the same."];
  const sum = (name) => changes.reduce((total, change) => total + change[name], 0);
  const places = changes.length > 1 ? ` The differences are in ${count(changes.length)} places.` : "";
  return [...to, `${same}. After them, ${tokensOf(sum("removed_tokens"))} left, and ${tokensOf(sum("added_tokens"))} came.${places}`];
}

function removedPart({ removed, removed_tokens: number }) {
  const rest = number - removed.length;
  const text = `${removed.join("")}${rest ? `… and ${tokensOf(rest)} more` : ""}`;
  return text ? [element("del", {}, text)] : [];
}

function answerPart({ answer, is_open: isOpen, num_choices: ofEach }, more) {
  if (!answer) return ofEach || isOpen ? [element("h3", {}, "Answer"), element("p", { class: "note" }, isOpen ? "Its tokens are not known yet. An answer that is not streamed comes as a whole." : "There is none.")] : [];
  const { num_tokens: number, gaps_ns: gaps, finish_reason: reason } = answer;
  let view = "certainty";
  const usual = gaps?.length ? Math.max(1, gaps.toSorted((a, b) => a - b)[gaps.length >> 1]) : 1;
  const list = new TokenList("Tokens of the answer", answer, (at) => {
    const logprob = answer.logprobs?.[at] ?? null;
    const gap = gaps?.[at - 1] ?? null;
    const sure = logprob === null ? null : Math.exp(logprob);
    const value = view === "cost" ? (gap ?? 0) / usual : 1 - (sure ?? 1);
    const time = gap === null ? "" : gap ? `${duration(gap / 1e9)} after the token before it` : "in one step with the token before it";
    const says = [sure === null ? "not drawn, so without a certainty" : `${percent(sure)} sure`, time];
    return { class: view === "text" ? "" : `shade-${shade(value, VIEWS[view].bounds)}`, says };
  });
  list.more = (start) => more({ answer_start: start }).then((found) => {
    answer.logprobs.push(...found.answer.logprobs);
    gaps?.push(...(found.answer.gaps_ns ?? []));
    return found.answer;
  });
  list.add(answer);
  const shades = element("ul", { class: "legend", "aria-label": "Shades of tokens" }, ...legend(view));
  const choose = (chosen) => {
    view = chosen;
    shades.replaceChildren(...(view === "text" ? [] : legend(view)));
    list.shade();
  };
  const end = isOpen ? "It is still being written." : reason ? `It ended with “${reason}”.` : "It was not finished.";
  const times = gaps || isOpen ? "" : " The times of single tokens are known only where a request has one choice.";
  return [
    element("h3", {}, "Answer"),
    element("p", { class: "note" }, `${tokensOf(number)}. ${end}${times}`),
    choice("Shade tokens of the answer", ANSWER_VIEWS.filter(([name]) => name !== "cost" || gaps), view, choose),
    shades,
    list.element,
  ];
}

// A list of tokens, of which one is described in the line below: the one under the pointer, or the one to which the
// arrow keys have led.
class TokenList {
  spans = [];
  before = () => []; // elements in front of a token, or at the end
  more = null; // fetches the tokens from a place on

  constructor(label, { num_tokens: number }, describe) {
    this.number = number;
    this.describe = describe;
    this.at = -1;
    this.flow = element("div", { class: "flow", tabindex: "0", role: "group", "aria-label": `${label}. Arrow keys go from one to the next.` });
    this.line = element("p", { class: "note token-line", role: "status" }, "Point at a token, or go to one with the arrow keys.");
    this.rest = element("button", { type: "button", hidden: "" }, "");
    this.element = element("div", { class: "token-list" }, this.flow, this.rest, this.line);
    this.flow.addEventListener("pointerover", ({ target }) => this.tell(this.placeOf(target)));
    this.flow.addEventListener("click", ({ target }) => this.mark(this.placeOf(target)));
    this.flow.addEventListener("keydown", (event) => this.keyed(event));
    this.rest.addEventListener("click", () => this.addMore());
  }

  // Fetches more tokens, and says so if there are none any more. Returns whether there were.
  async addMore() {
    try {
      this.add(await this.more(this.spans.length));
      return true;
    } catch (error) {
      this.line.textContent = error.message;
      return false;
    }
  }

  add({ texts, ids, start }) {
    let block = null;
    let length = 0;
    for (const [place, text] of texts.entries()) {
      if (!block) {
        block = this.flow.appendChild(element("div", { class: "block" }));
        length = 0;
      }
      const at = start + place;
      const { class: shown, isMedia } = this.describe(at);
      const last = this.spans.at(-1);
      if (isMedia && last?.dataset.media) { // one place for all tokens of an image
        last.dataset.media = Number(last.dataset.media) + 1;
        last.textContent = `⟨${tokensOf(Number(last.dataset.media))} of an image or a sound⟩`;
        this.spans.push(last);
        continue;
      }
      // The sign for the end of a line is where that line ends.
      const lines = text.split("\n").flatMap((line, number) => (number ? [element("i", { class: "end" }), `\n${line}`] : [line]));
      const span = element("span", { class: shown, "data-at": at, "data-id": ids[place] }, ...lines);
      if (isMedia) span.dataset.media = 1;
      if (!text) span.dataset.part = "";
      block.append(...this.before(at), span);
      this.spans.push(span);
      length++;
      if ((length >= BLOCK && text.endsWith("\n")) || length === LONGEST_BLOCK) block = null;
    }
    const left = this.number - this.spans.length;
    if (left <= 0) (this.flow.lastElementChild ?? this.flow).append(...this.before(this.number));
    this.rest.hidden = left <= 0;
    this.rest.textContent = `Show more: ${tokensOf(left)} left`;
  }

  shade() {
    for (const [at, span] of this.spans.entries()) span.className = `${this.describe(at).class}${at === this.at ? " marked" : ""}`;
  }

  placeOf(target) {
    return Number(target.closest("[data-at]")?.dataset.at ?? -1);
  }

  tell(at) {
    const span = this.spans[at];
    if (!span) return;
    const text = JSON.stringify(span.textContent || "part of the next character");
    this.line.textContent = [`${text}`, `token ${count(at + 1)}`, `id ${span.dataset.id}`, ...this.describe(at).says.filter(Boolean)].join(" · ");
  }

  mark(at) {
    if (!this.spans[at]) return;
    this.spans[this.at]?.classList.remove("marked");
    this.at = at;
    this.spans[at].classList.add("marked");
    this.spans[at].scrollIntoView({ block: "nearest" });
    this.tell(at);
  }

  async goTo(at) {
    while (at >= this.spans.length && this.spans.length < this.number) if (!(await this.addMore())) return;
    this.flow.focus({ preventScroll: true });
    this.mark(Math.min(at, this.spans.length - 1));
  }

  keyed(event) {
    const ends = { Home: 0, End: this.spans.length - 1 };
    const to = event.key in STEPS ? this.at + STEPS[event.key] : ends[event.key];
    if (to === undefined || !this.spans.length) return;
    event.preventDefault();
    const last = this.spans.length - 1;
    let at = Math.max(0, Math.min(last, to));
    while (at < last && to > this.at && this.spans[at] === this.spans[this.at]) at++; // past the tokens of an image
    this.mark(at);
  }
}

const tokensOf = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;
