// Shows one answer of a model: its reasoning, text, tool calls with their results, and the account of each step.

import { Account, sum } from "./answer_account.js";
import { canGoOn, phasesOf } from "./ask.js";
import { showMarkdown } from "./markdown.js";
import { count, element, indented } from "./show.js";
import { parting, partingSentence, shadeTokens } from "./tokens.js";

const TOO_LONG = "context_length_exceeded"; // an error's code

export class Answer {
  #steps = []; // the elements of each step

  // `all` are the answers of its turn, which it is compared with, and `together` those that are shown next to it.
  // `page` has `goOn(answer, body)`, which sends tool results if `mayGoOn(answer)` allows it. `tools` are buttons.
  constructor(answer, { all, together, page, tools }) {
    this.answer = answer;
    this.all = all;
    this.together = together;
    this.page = page;
    this.element = element("article", { class: "answered", "aria-label": `Answer of ${answer.model}` });
    const asked = answer.asked ? [element("small", {}, ` ${answer.asked}`)] : [];
    this.element.append(element("h2", { class: together.length > 1 ? "" : "unseen" }, answer.model, ...asked));
    this.tools = element("div", { class: "tools" }, ...tools);
    this.draw();
  }

  draw() {
    const { steps } = this.answer;
    const isOpen = steps.some((step) => step.isOpen);
    this.element.setAttribute("aria-busy", String(isOpen));
    steps.forEach((step, place) => {
      this.#steps[place] ??= this.#newStep(step);
      this.#drawStep(step, this.#steps[place], place === steps.length - 1);
    });
    this.tools.hidden = isOpen;
    const { foot } = this.#steps.at(-1);
    if (this.tools.parentElement !== foot) foot.append(this.tools);
  }

  #newStep(step) {
    const make = (tag, attributes, ...children) => this.element.appendChild(element(tag, attributes, ...children));
    const thinking = element("summary", {});
    const thoughts = element("div", { class: "text" });
    const reasoning = make("details", { class: "reasoning" }, thinking, thoughts);
    thinking.addEventListener("click", () => (reasoning.isChosen = true));
    const [text, calls, end] = ["markdown", "calls", "end"].map((name) => make("div", { class: name }));
    const waiting = make("div", { class: "progress", hidden: "" });
    const account = new Account(step, () => this.draw());
    const foot = make("div", { class: "foot" }, account.element);
    return { reasoning, thinking, thoughts, text, calls, end, waiting, account, foot };
  }

  #drawStep(step, parts, isLast) {
    const { content, calls } = step.message;
    const found = isLast ? this.#parting(step) : undefined;
    const isCompared = found !== undefined && this.all[0] !== this.answer;
    const totals = this.together.flatMap(({ steps }) => steps.map((other) => sum(phasesOf(other))));
    parts.account.draw(Math.max(...totals), isCompared ? [partingSentence(found)] : []);
    parts.account.element.hidden = step.isOpen && !step.tokens.length;
    this.#drawWaiting(step, parts.waiting);
    const { view } = parts.account;
    const drawn = [view, step.tokens.length, step.isOpen, step.why, found?.at, step.results, this.page.mayResume(this.answer)].join();
    if (parts.drawn === drawn) return; // so that a selection in the text stays
    parts.drawn = drawn;
    this.#drawReasoning(step, parts);
    parts.text.hidden = !content && this.answer.given === undefined;
    const isShaded = view !== "text" && !step.isOpen;
    if (parts.isShaded || isShaded) parts.text.replaceChildren(); // shading replaces its elements
    parts.isShaded = isShaded;
    const shown = this.#showText(step, parts.text, isShaded);
    if (!parts.form) parts.calls.replaceChildren(...calls.map((call) => this.#call(step, call)));
    if (isLast && this.page.mayGoOn(this.answer) && calls.length && !parts.form) this.#askForResults(step, parts);
    if (isShaded) shadeTokens(step, view, [...shown, ...this.#shownCalls(step, parts)], found?.at ?? null);
    parts.end.replaceChildren(...ends(step), ...(isLast ? this.#again(step) : []));
  }

  // Returns a button that goes on with an answer that ended too early. A prompt that is too long would be refused again.
  #again(step) {
    if (!this.page.mayResume(this.answer)) return [];
    if (step.error?.code === TOO_LONG) return [element("button", { type: "button", onclick: () => this.page.editLast() }, "Edit")];
    const resume = () => this.page.resume([this.answer]);
    return [element("button", { type: "button", onclick: resume }, canGoOn(step) ? "Continue" : "Try again")];
  }

  // Shows the text of the answer, and returns pairs of an element and the place of its source in the tokens' text.
  // Formulas whose tokens are to be shaded stay in TeX.
  #showText(step, box, isShaded) {
    const { content, reasoning } = step.message;
    const from = step.tokens.map(([text]) => text).join("").indexOf(content, reasoning.length);
    const start = Math.max(0, from);
    if (this.answer.given !== undefined) {
      const continued = element("span", {}, content);
      box.classList.add("text");
      box.replaceChildren(element("span", { class: "given" }, this.answer.given), continued);
      return [[continued, [start, start + content.length]]];
    }
    if (step.isJson) {
      box.replaceChildren(element("pre", { tabindex: "0" }, pretty(step, content)));
      return [[box, [start, start + content.length]]];
    }
    const starts = [0];
    for (const line of content.split("\n")) starts.push(starts.at(-1) + line.length + 1);
    return showMarkdown(box, content, isShaded).map(({ element: block, lines: [first, end] }) => [block, [start + starts[first], start + starts[end]]]);
  }

  #shownCalls(step, parts) {
    const whole = step.tokens.map(([text]) => text).join("");
    return step.message.calls.flatMap(({ arguments: text }, place) => {
      const from = whole.lastIndexOf(text);
      return from < 0 ? [] : [[parts.calls.children[place].querySelector("pre"), [from, from + text.length]]];
    });
  }

  #drawWaiting(step, box) {
    const text = waitingFor(step, this.answer);
    box.hidden = text === null;
    if (text === null || (box.firstChild?.textContent === text && !step.progress)) return;
    const { processed, total } = step.progress ?? {};
    const bar = total ? [element("progress", { max: total, value: processed, "aria-label": "Prompt tokens read" })] : [];
    box.replaceChildren(element("span", {}, text), ...bar);
  }

  #drawReasoning(step, { reasoning, thinking, thoughts }) {
    const isThinking = step.isOpen && step.thoughtMs === undefined;
    const seconds = step.thoughtMs / 1e3;
    reasoning.hidden = !step.message.reasoning;
    thinking.textContent = isThinking ? "Thinking…" : seconds ? `Thought for ${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : "Thoughts";
    if (!reasoning.isChosen) reasoning.open = isThinking;
    thoughts.textContent = step.message.reasoning;
  }

  // Returns where the last step differs from that of the first answer, or the first from the second one; undefined if
  // there is none.
  #parting(step) {
    const other = this.all.find((answer) => answer !== this.answer)?.steps.at(-1);
    const areWhole = [step, other].every((one) => one && !one.isOpen && !one.error && one.tokens.length);
    return areWhole ? parting(other, step) : undefined;
  }

  #call(step, call) {
    const result = step.results?.[call.id];
    const title = element("h3", {}, "Called ", element("code", {}, call.name));
    const parts = [title, element("pre", { tabindex: "0" }, pretty(step, call.arguments))];
    if (result !== undefined) parts.push(element("h3", {}, "Result"), element("pre", { tabindex: "0" }, result));
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
    const button = element("button", { type: "submit" }, boxes.length > 1 ? "Send the results" : "Send the result");
    parts.form = element("form", { class: "results", onsubmit: send }, ...labels, button);
    parts.calls.append(parts.form);
  }
}

// Returns the reason why an open step has no tokens yet, or null.
function waitingFor(step, answer) {
  if (step.isMoving) return "The server is gone. Another one is about to continue this answer…";
  if (!step.isOpen || step.tokens.length) return null;
  if (!step.progress) return answer.isLoading ? "Loading the model…" : "Waiting for the first token…";
  const { processed, total, rest_ms: restMs, atMs } = step.progress;
  const left = restMs === undefined ? null : Math.ceil((restMs - (performance.now() - atMs)) / 1e3);
  const rest = left === null ? "" : left > 1 ? `, about ${left < 100 ? `${left} s` : `${Math.round(left / 60)} min`} left` : ", almost done";
  return `Reading the prompt: ${count(processed)} of ${count(total)} tokens${rest}`;
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
  if (step.isCut) {
    found.push(element("p", { class: "note" }, "Not complete: the page was closed."));
  } else if (step.error) {
    found.push(element("p", { class: "error" }, step.error.message));
    if (step.error.param && step.error.param !== "messages") found.push(element("p", { class: "note" }, "Parameter: ", element("code", {}, step.error.param)));
  } else if (step.isStopped) found.push(element("p", { class: "note" }, "Stopped by you."));
  if (step.finish === "length") found.push(element("p", { class: "note" }, "Stopped at the token limit."));
  if (step.finish === "repetition") found.push(element("p", { class: "note" }, "Stopped, because this answer repeats itself. A higher repetition penalty in the settings may help."));
  return found;
}
