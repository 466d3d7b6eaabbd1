// The settings of a conversation: models, parameters, and the form of its answers. What is not JSON is told at its box.

import { byId, element, showProblem } from "./show.js";

const NUMBERS = ["temperature", "top_p", "max_completion_tokens", "seed"];

export class Settings {
  #readers = []; // the models that read pictures
  #fields = [...byId("settings").querySelectorAll("[name]")];
  #schema = new JsonBox("schema", isObject, "A schema is an object: {...}.");
  #tools = new JsonBox("tools", isListOfObjects, "Tools are a list of objects: [{...}, ...].");

  constructor() {
    byId("settings").addEventListener("change", () => this.#show());
    this.#show();
  }

  // Offers the models that write text. One is chosen at least.
  offer(models) {
    const chosen = this.models();
    this.#readers = models.filter((model) => model.input_modalities?.includes("image")).map(({ id }) => id);
    const writing = models.filter(({ task }) => task === undefined || task === "generate");
    const shown = [...byId("models").querySelectorAll("input")].map(({ value }) => value);
    byId("no-model").hidden = writing.length > 0;
    this.#offerCamera();
    if (writing.map(({ id }) => id).join("\n") === shown.join("\n")) return; // what has the focus keeps it
    const boxes = writing.map(({ id }, place) => {
      const box = element("input", { type: "checkbox", name: "model", value: id });
      box.checked = chosen.length ? chosen.includes(id) : place === 0;
      return element("label", {}, box, ` ${id}`);
    });
    byId("models").replaceChildren(element("legend", {}, "Models, side by side"), ...boxes);
    byId("models").hidden = boxes.length < 2;
    this.#show();
  }

  models() {
    return [...byId("models").querySelectorAll(":checked")].map(({ value }) => value);
  }

  // Returns whether each chosen model reads pictures.
  readsPictures() {
    return this.models().length > 0 && this.models().every((id) => this.#readers.includes(id));
  }

  #offerCamera() {
    byId("camera-label").hidden = !this.readsPictures();
    byId("attach").parentElement.firstChild.data = this.readsPictures() ? "Attach texts or pictures " : "Attach text files ";
  }

  // Returns the settings as they are kept with a conversation.
  value() {
    const fields = this.#fields.filter((field) => field.type !== "radio" || field.checked);
    return { ...Object.fromEntries(fields.map(({ name, value }) => [name, value])), models: this.models() };
  }

  set({ models, ...values }) {
    for (const field of this.#fields) {
      const value = values[field.name] ?? field.defaultValue ?? "";
      if (field.type === "radio") field.checked = value === field.value;
      else field.value = value;
    }
    const boxes = [...byId("models").querySelectorAll("input")];
    const kept = boxes.filter(({ value }) => models.includes(value));
    boxes.forEach((box, place) => (box.checked = kept.length ? kept.includes(box) : place === 0));
    this.#show();
    byId("tool_choice").value = values.tool_choice ?? byId("tool_choice").value; // a name that is offered only now
  }

  // Returns the fields of a request, but for model and messages. If a box has something wrong, it returns null, and the
  // box gets the focus. It does so, too, if no model is chosen.
  body() {
    const value = this.value();
    showProblem(value.models.length ? "" : "No model is chosen. The settings list those that write text.");
    if (!value.models.length) return null;
    const numbers = NUMBERS.filter((name) => value[name] !== "").map((name) => [name, Number(value[name])]);
    const effort = value.reasoning_effort ? { reasoning_effort: value.reasoning_effort } : {};
    const form = this.#formOfAnswer(value);
    if (form === null) {
      byId("settings").open = true;
      byId(value.kind).focus();
      return null;
    }
    return {
      ...Object.fromEntries(numbers),
      ...effort,
      ...form,
      logprobs: true,
      stream: true,
      stream_options: { include_usage: true, include_timings: true },
    };
  }

  #formOfAnswer({ kind, tool_choice: choice }) {
    if (kind === "schema") {
      const schema = this.#schema.read();
      return schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
    }
    if (kind === "tools") {
      const tools = this.#tools.read();
      return tools && { tools, tool_choice: JSON.parse(choice) };
    }
    return {};
  }

  #show() {
    const { kind } = this.value();
    byId("schema-fields").hidden = kind !== "schema";
    byId("tools-fields").hidden = kind !== "tools";
    byId("prompt").placeholder = byId("settings").querySelector(`[value=${kind}]`).dataset.example;
    this.#offerTools();
    this.#offerCamera();
    byId("settings-summary").textContent = shortly(this.value());
  }

  // Offers each tool by its name, so that a call of it can be forced.
  #offerTools() {
    const names = (this.#tools.read() ?? []).map((tool) => tool.function?.name).filter((name) => typeof name === "string");
    const named = names.map((name) => [name, JSON.stringify({ type: "function", function: { name } })]);
    const choice = byId("tool_choice");
    const before = choice.value;
    byId("named-tools").replaceChildren(...named.map(([name, value]) => element("option", { value }, name)));
    choice.value = before;
    if (choice.selectedIndex < 0) choice.selectedIndex = 0; // that tool is gone
  }
}

// Returns the settings that are not the usual ones, in a few words.
export function shortly({ temperature, top_p, seed, reasoning_effort, kind }) {
  const named = { temperature, "top p": top_p, seed, effort: reasoning_effort };
  const given = Object.entries(named).filter(([, value]) => value).map(([name, value]) => `${name} ${value}`);
  return [...given, ...(kind === "text" ? [] : [{ schema: "JSON Schema", tools: "tools" }[kind]])].join(", ");
}

// A text box for JSON, with a place below it for what is wrong.
class JsonBox {
  constructor(id, fits, wanted) {
    this.box = byId(id);
    this.problem = byId(`${id}-problem`);
    this.fits = fits;
    this.wanted = wanted;
    this.box.addEventListener("change", () => this.read());
    this.box.addEventListener("input", () => this.#tell(""));
  }

  // Returns the value, or null if it is not right, which the user is told.
  read() {
    let value = null;
    try {
      value = JSON.parse(this.box.value);
    } catch (error) {
      this.#tell(`This is not JSON: ${error.message}.`);
      return null;
    }
    const fits = this.fits(value);
    this.#tell(fits ? "" : this.wanted);
    return fits ? value : null;
  }

  #tell(problem) {
    this.problem.textContent = problem;
    this.box.setAttribute("aria-invalid", String(problem !== ""));
  }
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isListOfObjects(value) {
  return Array.isArray(value) && value.every(isObject);
}
