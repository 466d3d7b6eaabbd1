// The settings of a conversation: the system prompt, parameters, and the form of its answers. A box that has no valid
// JSON says so.

import { store } from "./conversations.js";
import { byId, element, showProblem } from "./show.js";
import { local } from "./storage.js";

const STORED = "oaiserve-settings"; // holds the last settings for the next visit
const NUMBERS = [
  ...["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"],
  ...["seed", "max_completion_tokens"],
];
const NEUTRAL = { temperature: 1, top_p: 1, top_k: "off", min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, max_completion_tokens: "no limit" };

export class Settings {
  #fields = [...byId("settings").querySelectorAll("[name]")];
  #schema = new JsonBox("schema", isObject, "A schema is an object: {...}.");
  #tools = new JsonBox("tools", isListOfObjects, "Tools are a list of objects: [{...}, ...].");

  constructor() {
    byId("settings").addEventListener("change", () => {
      this.#show();
      try {
        store(STORED, JSON.stringify(this.value()));
      } catch (error) {
        showProblem(`This browser has no room for the settings (${error.name}). Delete a chat.`);
      }
    });
    byId("reset-settings").addEventListener("click", () => {
      this.set({});
      local.removeItem(STORED);
    });
    this.set(JSON.parse(local.getItem(STORED) ?? "{}"));
  }

  // Shows the defaults in empty fields.
  offerDefaults(models) {
    const [model = {}] = models.length === 1 ? models : [];
    const own = { ...model.default_sampling, max_completion_tokens: model.default_max_tokens };
    for (const field of this.#fields) {
      if (field.name in NEUTRAL) field.placeholder = models.length > 1 ? "default" : String(own[field.name] ?? NEUTRAL[field.name]);
    }
  }

  // Returns the settings as they are stored with a conversation.
  value() {
    const fields = this.#fields.filter((field) => field.type !== "radio" || field.checked);
    return Object.fromEntries(fields.map(({ name, value }) => [name, value]));
  }

  set(values) {
    for (const field of this.#fields) {
      const value = values[field.name] ?? field.defaultValue ?? "";
      if (field.type === "radio") field.checked = (values.kind ?? "text") === field.value;
      else field.value = value;
    }
    this.#show();
    byId("tool_choice").value = values.tool_choice ?? byId("tool_choice").value; // the option may exist only now
  }

  // Returns the fields of a request except model and messages. If a box is invalid, it gets the focus, and the result
  // is null.
  body() {
    const value = this.value();
    const wrong = this.#fields.find((field) => !field.validity.valid);
    const form = this.#formOfAnswer(value);
    if (wrong || form === null) {
      byId("settings").hidden = false;
      if (wrong) wrong.reportValidity();
      else byId(value.kind).focus();
      return null;
    }
    const stop = value.stop.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
    return {
      ...Object.fromEntries(NUMBERS.filter((name) => value[name] !== "").map((name) => [name, Number(value[name])])),
      ...(stop.length ? { stop } : {}),
      ...(value.reasoning_effort ? { reasoning_effort: value.reasoning_effort } : {}),
      ...form,
      logprobs: true,
      repetition_detection: true,
      stream: true,
      stream_options: { include_usage: true, include_timings: true },
      return_progress: true,
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
    const value = this.value();
    byId("schema-fields").hidden = value.kind !== "schema";
    byId("tools-fields").hidden = value.kind !== "tools";
    this.#offerTools();
    byId("settings-summary").textContent = [value.system.trim() ? "system prompt" : "", shortly(value)].filter(Boolean).join(", ") || "Default settings";
  }

  // Offers each tool by its name, so that a call of it can be forced.
  #offerTools() {
    const names = (this.#tools.read() ?? []).map((tool) => tool.function?.name).filter((name) => typeof name === "string");
    const named = names.map((name) => [name, JSON.stringify({ type: "function", function: { name } })]);
    const choice = byId("tool_choice");
    const before = choice.value;
    byId("named-tools").replaceChildren(...named.map(([name, value]) => element("option", { value }, name)));
    choice.value = before;
    if (choice.selectedIndex < 0) choice.selectedIndex = 0; // the chosen tool is gone
  }
}

// Returns the settings that differ from the defaults, in a few words.
export function shortly({ kind, max_completion_tokens: most, reasoning_effort: effort, stop, ...values }) {
  const numbers = NUMBERS.filter((name) => values[name]).map((name) => `${name.replaceAll("_", " ")} ${values[name]}`);
  const others = [most ? `at most ${most} tokens` : "", effort ? `effort ${effort}` : "", stop ? "stop" : ""];
  return [...numbers, ...others, { schema: "JSON Schema", tools: "tools" }[kind] ?? ""].filter(Boolean).join(", ");
}

// A text box for JSON, with a place for an error below it.
class JsonBox {
  constructor(id, fits, wanted) {
    this.box = byId(id);
    this.problem = byId(`${id}-problem`);
    this.fits = fits;
    this.wanted = wanted;
    this.box.addEventListener("change", () => this.read());
    this.box.addEventListener("input", () => this.#report(""));
  }

  // Returns the value. If it is wrong, shows an error and returns null.
  read() {
    let value = null;
    try {
      value = JSON.parse(this.box.value);
    } catch (error) {
      this.#report(`This is not JSON: ${error.message}.`);
      return null;
    }
    const fits = this.fits(value);
    this.#report(fits ? "" : this.wanted);
    return fits ? value : null;
  }

  #report(problem) {
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
