// The model picker: one model answers, or several next to each other.

import { byId, count, element } from "./show.js";

const PICKER_PX = 290; // width of the list

export class Models {
  #models = []; // of the server, if they write text
  areKnown = false; // whether the server has named its models

  // `changed()` is called when the choice or the list of models changes.
  constructor(changed) {
    this.changed = changed;
    byId("model-list").addEventListener("change", ({ target }) => {
      if (target.type === "radio") byId("picker").hidePopover();
      this.#show();
    });
    byId("compare").addEventListener("change", ({ target }) => {
      const chosen = this.chosen();
      for (const box of this.#boxes) {
        box.type = target.checked ? "checkbox" : "radio";
        box.checked = target.checked ? chosen.includes(box.value) : box.value === chosen[0];
      }
      this.#show();
    });
    byId("picker").addEventListener("beforetoggle", () => {
      byId("picker").style.setProperty("--picker-left", `${Math.min(byId("model-button").offsetLeft + byId("chat").offsetLeft, innerWidth - PICKER_PX)}px`);
    });
    byId("picker").addEventListener("toggle", ({ newState }) => {
      byId("model-button").setAttribute("aria-expanded", String(newState === "open"));
      if (newState === "open") this.#boxes.find((box) => box.checked)?.focus();
    });
  }

  get #boxes() {
    return [...byId("model-list").querySelectorAll("input")];
  }

  // Offers the models of the server that write text. At least one is chosen.
  offer(models) {
    const chosen = this.chosen();
    const isFirst = !this.#models.length;
    this.areKnown = true;
    this.#models = models.filter(({ task }) => task === undefined || task === "generate");
    byId("no-model").hidden = this.#models.length > 0;
    byId("model-button").hidden = !this.#models.length;
    const type = byId("compare").checked ? "checkbox" : "radio";
    const focused = document.activeElement?.name === "model" ? document.activeElement.value : null;
    const rows = this.#models.map((model) => {
      const box = element("input", { type, name: "model", value: model.id, title: model.id });
      return element("label", {}, box, element("span", {}, model.id, element("small", {}, details(model))));
    });
    byId("model-list").replaceChildren(...rows);
    byId("compare").parentElement.hidden = this.#models.length < 2;
    this.choose(isFirst && this.wanted ? this.wanted : chosen);
    this.#boxes.find(({ value }) => value === focused)?.focus();
  }

  // Chooses models by their ids, or the first model if the server has none of these. Waits for the list of models.
  choose(ids) {
    this.wanted = ids;
    const found = this.#boxes.filter(({ value }) => ids.includes(value));
    if (found.length > 1 && !byId("compare").checked) {
      byId("compare").checked = true;
      for (const box of this.#boxes) box.type = "checkbox";
    }
    this.#boxes.forEach((box, place) => (box.checked = found.length ? found.includes(box) : place === 0));
    this.#show();
  }

  chosen() {
    return this.#boxes.filter(({ checked }) => checked).map(({ value }) => value);
  }

  // Returns the chosen models as the server lists them.
  get all() {
    const chosen = this.chosen();
    return this.#models.filter(({ id }) => chosen.includes(id));
  }

  // Whether the chosen models have no chat template, so that they only continue texts.
  get complete() {
    return this.all.length > 0 && this.all.every((model) => model.has_chat_template === false);
  }

  // Returns whether each chosen model reads pictures.
  readsPictures() {
    return this.all.length > 0 && this.all.every((model) => model.input_modalities?.includes("image"));
  }

  #show() {
    const { all } = this;
    const name = all.map(({ id }) => id).join(", ") || "Choose a model";
    byId("model-name").textContent = name;
    byId("model-details").textContent = all.length === 1 && all[0].is_loaded === false ? "not loaded" : "";
    byId("prompt").placeholder = this.complete ? `Begin a text, and ${name} continues it` : all.length === 1 ? `Message ${name}` : "Message";
    byId("welcome-title").textContent = all.length ? `${this.complete ? "Continue texts" : "Chat"} with ${name}` : "";
    byId("welcome-details").textContent = all.length === 1 ? details(all[0]) : "";
    byId("welcome-note").textContent = all.length === 1 ? (all[0].description ?? "") : "";
    this.changed();
  }
}

function details(model) {
  const context = model.max_model_len ? `${count(model.max_model_len)} tokens of context` : "";
  const adapter = model.parent ? `adapter of ${model.parent}` : "";
  const reads = (model.input_modalities ?? []).filter((kind) => kind !== "text").map((kind) => `reads ${kind}s`);
  return [context, adapter, ...reads, model.is_loaded === false ? "not loaded" : ""].filter(Boolean).join(" · ");
}
