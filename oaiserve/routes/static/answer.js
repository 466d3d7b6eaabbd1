// Shows an answer while it is streamed: reasoning, text and calls of tools, in the order in which they begin.

import { element, indented } from "./show.js";

export class Answer {
  #box;
  #isJson; // whether the text should be JSON
  #calls = new Map(); // the name and the arguments of each call, by its index
  #open = {}; // the last part if it is text, which more text of its kind goes on
  #json = []; // elements whose text should be JSON in the end

  constructor(box, isJson) {
    this.#box = box;
    this.#isJson = isJson;
    box.replaceChildren();
  }

  // Takes what a chunk adds, and returns whether that was anything to show.
  take({ content, reasoning, reasoning_content: sameReasoning, tool_calls: calls }) {
    const thought = reasoning ?? sameReasoning;
    if (thought) this.#text("reasoning").append(thought);
    if (content) this.#text("content").append(content);
    for (const { index, function: called } of calls ?? []) {
      const call = this.#call(index);
      call.name.append(called?.name ?? "");
      call.arguments.append(called?.arguments ?? "");
    }
    return Boolean(thought || content || calls?.length);
  }

  // Ends the answer. JSON that is whole gets lines and indentation.
  finish(reason) {
    for (const part of this.#json) {
      if (isJson(part.textContent)) part.textContent = indented(part.textContent);
    }
    if (reason === "length") this.#box.append(element("p", { class: "note" }, "It was cut at the maximum of tokens."));
  }

  // Adds an error of the server or of the network; only the server's may name a parameter.
  fail({ message, param }) {
    const where = param ? [element("p", { class: "note" }, "Parameter: ", element("code", {}, param))] : [];
    this.#box.append(element("div", { class: "error" }, message), ...where);
  }

  #text(kind) {
    if (this.#open.kind !== kind) this.#open = { kind, text: this.#newText(kind) };
    return this.#open.text;
  }

  #newText(kind) {
    const text = element(kind === "content" && this.#isJson ? "pre" : "div", { class: kind });
    if (kind === "content") this.#box.append(text);
    else this.#box.append(element("details", { open: "" }, element("summary", {}, "Reasoning"), text));
    if (kind === "content" && this.#isJson) this.#json.push(text);
    return text;
  }

  #call(index) {
    if (!this.#calls.has(index)) {
      const call = { name: element("code"), arguments: element("pre") };
      this.#box.append(element("section", { class: "call" }, element("h3", {}, "Tool call ", call.name), call.arguments));
      this.#calls.set(index, call);
      this.#json.push(call.arguments);
      this.#open = {};
    }
    return this.#calls.get(index);
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
