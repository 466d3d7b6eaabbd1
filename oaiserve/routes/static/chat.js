// The chat: its conversations, the turns of the one that is open, and what is sent.

import { Answer } from "./answer.js";
import { ask, newStep } from "./ask.js";
import { Attached, thumbnail } from "./attached.js";
import { conversations, forget, keep, messages, newConversation } from "./conversations.js";
import { Settings, shortly } from "./settings.js";
import { byId, element, showProblem } from "./show.js";
import { legend } from "./tokens.js";

const DRAW_MS = 100; // between two looks of answers that grow
const NEAR_END_PX = 120; // within which the page follows them
const TITLE_CHARACTERS = 60;
const NOTHING = { text: "", files: [] };

export class Chat {
  view = "text"; // or a view of tokens
  #settings = new Settings();
  #attached = new Attached(() => this.#settings.readsPictures());
  #running = new Map(); // of each answer that is made: its conversation, and what stops it
  #open = null; // the conversation that is shown
  #editing = null; // the place of the turn that the message is to replace
  #shown = []; // the Answers of the page

  constructor() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat-form").requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.#editing !== null) this.#write(NOTHING);
      else this.#stop();
    });
    byId("settings").addEventListener("invalid", () => (byId("settings").open = true), true);
    byId("stop").addEventListener("click", () => this.#stop());
    byId("again").addEventListener("click", () => this.#askAll(this.#settings.body()));
    byId("stop-editing").addEventListener("click", () => this.#write(NOTHING));
    byId("new-chat").addEventListener("click", () => {
      this.#show(newConversation());
      byId("prompt").focus();
    });
    for (const button of byId("views").children) button.addEventListener("click", () => this.#choose(button));
    window.addEventListener("storage", () => this.#list()); // another tab has changed something
    if (matchMedia("(max-width: 46rem)").matches) byId("conversations").open = false;
    this.#show(newConversation());
  }

  // Offers the models of the server.
  offer(models) {
    this.#settings.offer(models);
  }

  // -- what is shown -------------------------------------------------------------------------------------------------

  #show(conversation) {
    this.#open = [...this.#running.values()].find((one) => one.conversation.id === conversation.id)?.conversation ?? conversation;
    if (this.#open.settings) this.#settings.set(this.#open.settings);
    if (this.#editing !== null) this.#write(NOTHING);
    this.#draw();
    this.#list();
  }

  #list() {
    const items = conversations().map((conversation) => {
      const isOpen = conversation.id === this.#open.id;
      const button = (label, onclick, attributes = {}) => element("button", { type: "button", onclick, ...attributes }, label);
      const title = button(conversation.title, () => this.#show(conversation), { class: "link", ...(isOpen ? { "aria-current": "true" } : {}) });
      const changes = [button("Rename", () => this.#rename()), button("Delete", () => this.#delete())];
      return element("li", {}, title, ...(isOpen ? changes : []));
    });
    byId("conversation-list").replaceChildren(...items);
  }

  #draw() {
    this.#shown = [];
    byId("turns").replaceChildren(...this.#open.turns.map((turn, place) => this.#turn(turn, place)));
    this.#showState();
  }

  #turn(turn, place) {
    const shown = ({ name, text }) => element("details", {}, element("summary", {}, name), element("pre", { tabindex: "0" }, text));
    const files = turn.files.map((file) => thumbnail(file) ?? shown(file));
    const edit = element("button", { type: "button", onclick: () => this.#write(turn, place) }, "Edit");
    const asked = element("article", { class: "asked", "aria-label": "Your message" }, element("div", { class: "text" }, turn.text), ...files, edit);
    const answers = turn.answers.map((answer) => new Answer(answer, turn.answers, this));
    this.#shown.push(...answers);
    return element("li", {}, asked, element("div", { class: "answers" }, ...answers.map((answer) => answer.element)));
  }

  #showState() {
    const isBusy = this.#isBusy;
    byId("send").disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("again").disabled = isBusy || !this.#open.turns.length;
    byId("turns").classList.toggle("busy", isBusy);
  }

  #choose(button) {
    this.view = button.value;
    for (const other of byId("views").children) other.setAttribute("aria-pressed", String(other === button));
    byId("shades").replaceChildren(...(this.view === "text" ? [] : legend(this.view)));
    for (const answer of this.#shown) answer.draw();
  }

  // Lets the user write a message that begins so, in place of a turn or as a new one.
  #write({ text, files }, editing = null) {
    this.#editing = editing;
    byId("prompt").value = text;
    this.#attached.set(files);
    byId("editing").hidden = editing === null;
    byId("prompt").focus();
  }

  #rename() {
    const title = prompt("Name of the conversation", this.#open.title)?.trim();
    if (!title) return;
    this.#open.title = title;
    this.#keep(this.#open);
  }

  #delete() {
    if (!confirm(`Delete “${this.#open.title}”?`)) return;
    this.#stop();
    this.#open.isGone = true;
    forget(this.#open);
    this.#show(newConversation());
    byId("new-chat").focus();
  }

  // -- what is sent --------------------------------------------------------------------------------------------------

  get #isBusy() {
    return [...this.#running.values()].some(({ conversation }) => conversation === this.#open);
  }

  #stop() {
    for (const { conversation, abort } of this.#running.values()) if (conversation === this.#open) abort.abort();
  }

  #send() {
    const text = byId("prompt").value.trim();
    if (!text || this.#isBusy) return;
    const body = this.#settings.body();
    if (body === null) return;
    const { turns } = this.#open;
    if (this.#editing !== null) turns.length = this.#editing;
    turns.push({ text, files: this.#attached.files, answers: [] });
    this.#open.title ||= text.length > TITLE_CHARACTERS ? `${text.slice(0, TITLE_CHARACTERS)}…` : text;
    this.#write(NOTHING);
    this.#askAll(body);
  }

  // Asks all chosen models for a further answer in the last turn.
  #askAll(body) {
    if (body === null) return;
    this.#open.settings = this.#settings.value();
    const { answers } = this.#open.turns.at(-1);
    const added = this.#settings.models().map((model) => ({ model, asked: shortly(this.#open.settings), steps: [] }));
    answers.push(...added);
    for (const answer of added) this.#ask(answer, body);
    this.#keep(this.#open);
    this.#draw();
    scrollTo(0, document.documentElement.scrollHeight);
  }

  // Returns the fields of a request now, or null if none may be sent.
  bodyNow() {
    return this.#isBusy ? null : this.#settings.body();
  }

  // Returns whether results of tools may be sent: the answer is complete, and no turn follows it.
  mayGoOn(answer) {
    return !answer.steps.at(-1).isOpen && this.#open.turns.at(-1).answers.includes(answer);
  }

  // Sends the results of tools that the last step of the answer has got.
  goOn(answer, body) {
    this.#ask(answer, body.tools ? { ...body, tool_choice: "auto" } : body);
    this.#showState();
  }

  async #ask(answer, body) {
    const conversation = this.#open;
    const step = newStep("response_format" in body);
    const asked = { ...body, model: answer.model, messages: messages(conversation, answer) };
    const abort = new AbortController();
    answer.steps.push(step);
    this.#running.set(answer, { conversation, abort });
    byId("said").textContent = `${answer.model} answers.`;
    this.#follow();
    await ask(step, asked, abort.signal);
    this.#running.delete(answer);
    this.#keep(conversation);
    if (conversation !== this.#open) return;
    const { content, calls } = step.message;
    byId("said").textContent = `${answer.model}: ${step.error?.message ?? (content || calls.map(({ name }) => `calls ${name}`).join(", "))}`;
    for (const shown of this.#shown) shown.draw();
    this.#showState();
  }

  // Draws what grows until nothing does, and keeps the end of the page in sight if it was.
  #follow() {
    this.drawing ??= setInterval(() => {
      const isNearEnd = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_END_PX;
      for (const shown of this.#shown) if (this.#running.has(shown.answer)) shown.draw();
      if (isNearEnd) scrollTo(0, document.documentElement.scrollHeight);
      if (!this.#running.size) this.drawing = clearInterval(this.drawing);
    }, DRAW_MS);
  }

  #keep(conversation) {
    if (conversation.isGone) return;
    conversation.changedMs = Date.now();
    try {
      if (!keep(conversation)) showProblem("This browser has no room for the pictures of this conversation. They are here until the page is closed.");
    } catch (error) {
      showProblem(`This browser has no room for this conversation (${error.name}). Delete another one.`);
    }
    this.#list();
  }
}
