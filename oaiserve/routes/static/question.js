// Makes the body of a chat request of the playground's form. What is not JSON is told at its box.

import { byId, element } from "./show.js";

export class Question {
  #kinds = [...document.getElementsByName("kind")]; // of answers: text, by a schema, with tools
  #schema = new JsonBox("schema", isObject, "A schema is an object: {...}.");
  #tools = new JsonBox("tools", isListOfObjects, "Tools are a list of objects: [{...}, ...].");

  constructor() {
    for (const kind of this.#kinds) kind.addEventListener("change", () => this.#choose(kind));
    byId("tools").addEventListener("change", () => this.#offerTools());
    this.#offerTools();
    this.#choose(this.#chosen); // a browser may have restored it
  }

  // Returns the body. If the box that it needs has something wrong, it returns null, and the box gets the focus.
  body() {
    const answer = this.#answerFields();
    if (answer === null) {
      byId(this.#chosen.value).focus();
      return null;
    }
    return {
      messages: [{ role: "user", content: byId("prompt").value }],
      max_completion_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      ...answer,
      stream: true,
      stream_options: { include_usage: true, include_timings: true },
    };
  }

  get #chosen() {
    return this.#kinds.find((kind) => kind.checked);
  }

  #answerFields() {
    if (this.#chosen.value === "schema") {
      const schema = this.#schema.read();
      return schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
    }
    if (this.#chosen.value === "tools") {
      const tools = this.#tools.read();
      return tools && { tools, tool_choice: JSON.parse(byId("tool-choice").value) };
    }
    return {};
  }

  // Shows the fields of this kind, and its example of a message unless the user has written another one.
  #choose(chosen) {
    byId("schema-fields").hidden = chosen.value !== "schema";
    byId("tools-fields").hidden = chosen.value !== "tools";
    const message = byId("prompt");
    if (this.#kinds.some((kind) => kind.dataset.example === message.value)) message.value = chosen.dataset.example;
  }

  // Offers each tool by its name, so that a call of it can be forced.
  #offerTools() {
    const names = (this.#tools.read() ?? []).map((tool) => tool.function?.name).filter((name) => typeof name === "string");
    const named = names.map((name) => [name, JSON.stringify({ type: "function", function: { name } })]);
    const choice = byId("tool-choice");
    const before = choice.value;
    byId("named-tools").replaceChildren(...named.map(([name, value]) => element("option", { value }, name)));
    choice.value = before;
    if (choice.selectedIndex < 0) choice.selectedIndex = 0; // that tool is gone
  }
}

// A text box for JSON, with a place below it for what is wrong.
class JsonBox {
  #box;
  #problem;
  #fits;
  #wanted;

  constructor(id, fits, wanted) {
    this.#box = byId(id);
    this.#problem = byId(`${id}-problem`);
    this.#fits = fits;
    this.#wanted = wanted;
    this.#box.addEventListener("change", () => this.read());
    this.#box.addEventListener("input", () => this.#tell(""));
  }

  // Returns the value, or null if it is not right, which the user is told.
  read() {
    let value = null;
    try {
      value = JSON.parse(this.#box.value);
    } catch (error) {
      this.#tell(`This is not JSON: ${error.message}.`);
      return null;
    }
    const fits = this.#fits(value);
    this.#tell(fits ? "" : this.#wanted);
    return fits ? value : null;
  }

  #tell(problem) {
    this.#problem.textContent = problem;
    this.#box.setAttribute("aria-invalid", String(problem !== ""));
  }
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isListOfObjects(value) {
  return Array.isArray(value) && value.every(isObject);
}
