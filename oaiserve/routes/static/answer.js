// Shows one answer of a model: what it said, the calls of tools and their results, and below that where its time went.

import { phasesOf } from "./ask.js";
import { Axis } from "./axis.js";
import { copyButton, showMarkdown } from "./markdown.js";
import { duration, element, indented, phaseSpans, placeBar, words } from "./show.js";
import { ROOT } from "./sse.js";
import { parting, partingSentence, shown } from "./tokens.js";

const SHOWN_SHARE = 0.01; // of a phase that is named below the bar

export class Answer {
  #steps = []; // the elements of each step

  // `beside` are the answers of its turn, with the first of which it is compared. `page` has the `view`, which is "text"
  // or one of tokens, and `goOn(answer, body)`, which sends results of tools if it `mayGoOn(answer)`.
  constructor(answer, beside, page) {
    this.answer = answer;
    this.beside = beside;
    this.page = page;
    this.element = element("article", { class: "answered", "aria-label": `Answer of ${answer.model}` });
    this.element.append(element("h3", {}, answer.model, element("small", {}, ` ${answer.asked}`)));
    this.draw();
  }

  draw() {
    const { steps } = this.answer;
    this.element.setAttribute("aria-busy", String(steps.some((step) => step.isOpen)));
    steps.forEach((step, place) => {
      this.#steps[place] ??= this.#newStep(step);
      this.#drawStep(step, this.#steps[place], place === steps.length - 1);
    });
  }

  #newStep(step) {
    const make = (tag, attributes) => this.element.appendChild(element(tag, attributes));
    const reasoning = make("details", { open: "" });
    reasoning.append(element("summary", {}, "Reasoning"), element("div", { class: "text" }));
    const [text, tokens, calls, end] = ["markdown", "text", "calls", "end"].map((name) => make("div", { class: name }));
    const [bar, phases, notes] = [make("div", { class: "track bar", "aria-hidden": "true" }), make("ul", { class: "legend" }), make("div", { class: "note" })];
    phases.setAttribute("aria-label", "Phases");
    const copy = copyButton("Copy", () => step.message.content);
    const account = element("a", {}, "Open this request");
    make("div", { class: "choice" }).append(copy, account);
    return { reasoning, text, tokens, calls, end, bar, phases, notes, copy, account };
  }

  #drawStep(step, parts, isLast) {
    const { content, reasoning, calls } = step.message;
    const isText = this.page.view === "text";
    const found = isLast ? this.#parting(step) : undefined;
    this.#drawTime(step, parts);
    const drawn = [this.page.view, step.tokens.length, step.isOpen, step.why, found?.at, step.results].join();
    if (parts.drawn === drawn) return; // a text that stays may be selected
    parts.drawn = drawn;
    parts.reasoning.hidden = !isText || !reasoning;
    parts.reasoning.lastChild.textContent = reasoning;
    parts.text.hidden = !isText || !content;
    parts.tokens.hidden = isText;
    if (isText && step.isJson) parts.text.replaceChildren(element("pre", { tabindex: "0" }, pretty(step, content)));
    else if (isText) showMarkdown(parts.text, content);
    else parts.tokens.replaceChildren(...shown(step, this.page.view, found?.at ?? null));
    if (!parts.form) parts.calls.replaceChildren(...calls.map((call) => this.#call(step, call)));
    if (isLast && this.page.mayGoOn(this.answer) && calls.length && !parts.form) this.#askForResults(step, parts);
    parts.end.replaceChildren(...ends(step));
    const isCompared = found !== undefined && this.beside[0] !== this.answer;
    const sentences = step.why.slice(0, 1).concat(isCompared ? partingSentence(found) : [], counts(step));
    parts.notes.replaceChildren(...sentences.filter(Boolean).map((text) => element("p", {}, text)));
    parts.copy.hidden = step.isOpen || !content;
    parts.account.hidden = step.isOpen || !step.requestId;
    if (step.requestId) parts.account.href = new URL(`requests/${encodeURIComponent(step.requestId)}`, ROOT);
  }

  // Returns where the last step parts from that of the first answer, or the first from the second one; undefined if there
  // is none.
  #parting(step) {
    const other = this.beside.find((answer) => answer !== this.answer)?.steps.at(-1);
    return other && !step.isOpen && !other.isOpen && !step.error && !other.error ? parting(other, step) : undefined;
  }

  #call(step, call) {
    const result = step.results?.[call.id];
    const title = element("h4", {}, "Tool call ", element("code", {}, call.name));
    const parts = [title, element("pre", { tabindex: "0" }, pretty(step, call.arguments))];
    if (result !== undefined) parts.push(element("h4", {}, "Its result"), element("pre", { tabindex: "0" }, result));
    return element("section", { class: "call" }, ...parts);
  }

  #askForResults(step, parts) {
    const boxes = step.message.calls.map(() => element("textarea", { rows: "2", required: "" }));
    const labels = step.message.calls.map(({ name }, place) => element("label", {}, `Result of ${name}${boxes.length > 1 ? `, call ${place + 1}` : ""}`, boxes[place]));
    const send = (event) => {
      event.preventDefault();
      const body = this.page.bodyNow();
      if (body === null) return;
      step.results = Object.fromEntries(step.message.calls.map(({ id }, place) => [id, boxes[place].value]));
      parts.form = parts.form.remove();
      this.page.goOn(this.answer, body);
    };
    parts.form = element("form", { class: "results", onsubmit: send }, ...labels, element("button", { type: "submit" }, "Send the results"));
    parts.calls.append(parts.form);
  }

  #drawTime(step, { bar, phases }) {
    const found = phasesOf(step);
    const totals = this.beside.flatMap(({ steps }) => steps.map((other) => sum(phasesOf(other))));
    const axis = new Axis([[0, Math.max(1, ...totals) * 1e-6]], () => "");
    placeBar(bar, phaseSpans(0, found), axis);
    const named = found.filter(([, ns]) => ns >= SHOWN_SHARE * sum(found));
    phases.replaceChildren(...named.map(([name, ns]) => element("li", {}, element("i", { class: `phase-${name}` }), `${words(name)} ${duration(ns / 1e9)}`)));
  }
}

function sum(phases) {
  return phases.reduce((total, [, ns]) => total + ns, 0);
}

// Returns JSON that is whole with a line for each member, and any other text as it is.
function pretty(step, text) {
  try {
    if (!step.isOpen) JSON.parse(text);
    return step.isOpen ? text : indented(text);
  } catch {
    return text;
  }
}

function ends(step) {
  const found = [];
  if (step.error) {
    found.push(element("p", { class: "error" }, step.error.message));
    if (step.error.param) found.push(element("p", { class: "note" }, "Parameter: ", element("code", {}, step.error.param)));
  }
  if (step.isStopped) found.push(element("p", { class: "note" }, "You stopped it."));
  if (step.finish === "length") found.push(element("p", { class: "note" }, "It was cut at the most tokens."));
  return found;
}

function counts({ usage, phases, eventsMs, isOpen }) {
  if (!usage || isOpen) return isOpen && eventsMs.length ? `${eventsMs.length} events so far.` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const { image_tokens: pictures } = usage.prompt_tokens_details ?? {};
  const thought = usage.completion_tokens_details?.reasoning_tokens;
  const seconds = (phases.find(([name]) => name === "decode")?.[1] ?? 0) / 1e9;
  const rate = seconds && usage.completion_tokens > 1 ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} a second` : "";
  return `${usage.prompt_tokens} prompt tokens (${cached} cached${pictures ? `, ${pictures} of pictures` : ""}), ${usage.completion_tokens} generated${thought ? `, ${thought} of them reasoning` : ""}${rate}.`;
}
