// The chat page: the turns of the open conversation, and the requests for new ones.

import { Answer } from "./answer.js";
import { ask, canGoOn, COMPLETION_TOKENS, completing, newStep, reopened } from "./ask.js";
import { chip } from "./attached.js";
import { Composer } from "./composer.js";
import { addVersion, chooseVersion, conversations, keep, keyOf, messages, newConversation, rounds, shownAnswers, shownRound } from "./conversations.js";
import { exampleButtons } from "./examples.js";
import { copyButton, drawIcons, iconButton } from "./icons.js";
import { Models } from "./models.js";
import { showMain, start } from "./page.js";
import { Settings, shortly } from "./settings.js";
import { offerShortcuts } from "./shortcuts.js";
import { byId, element, RETRY_MS, setStatus, showLost, showProblem } from "./show.js";
import { Sidebar } from "./sidebar.js";
import { reach, requestJson, ROOT } from "./sse.js";
import { isLasting } from "./storage.js";
import { stepsElsewhere, Tabs } from "./tabs.js";

const DRAW_MS = 100; // between two drawings of growing answers
const KEEP_MS = 2000; // between two times that they are stored
const LOOK_MS = 30_000; // between two requests for the models
const HEALTH_MS = 1500; // between two questions whether the server is there
const NEAR_END_PX = 60; // within which the page follows an answer
const TITLE_CHARACTERS = 60;
const LONG_CHARACTERS = 1500; // of a message, and
const LONG_LINES = 20; // above which it is folded
const NOTHING = { text: "", files: [] };

class Chat {
  open = newConversation(); // the conversation that is shown
  #settings = new Settings();
  #models = new Models(() => this.#adapt());
  #composer = new Composer(this);
  #sidebar = new Sidebar(this);
  #tabs = new Tabs(this);
  #running = new Map(); // the conversation and the AbortController of each running answer
  #editing = null; // the place of the turn that the message is to replace
  #shown = []; // the Answers of the page
  #left = []; // the answers that go on after a reload
  #early = null; // the message that is sent once the models are known
  #follows = true; // whether the page scrolls to the end as the conversation grows

  constructor() {
    byId("new-chat").addEventListener("click", () => this.begin());
    byId("stop-editing").addEventListener("click", () => this.#write(NOTHING));
    byId("to-end").addEventListener("click", () => this.#scrollToEnd());
    byId("scroll").addEventListener("scroll", () => this.#offerEnd());
    new ResizeObserver(() => (this.#follows ? this.#scrollToEnd() : this.#offerEnd())).observe(byId("scroll"));
    window.addEventListener("storage", ({ key }) => this.#follow(key));
    window.addEventListener("popstate", () => this.show(addressed() ?? newConversation(), { isMoved: true }));
    window.addEventListener("pagehide", () => this.#leave());
    if (!isLasting) showProblem("This browser does not allow this page to store anything. Chats are lost when you close or reload it.");
    offerShortcuts({ page: this, sidebar: this.#sidebar });
    this.show(addressed() ?? this.open, { isMoved: true });
    this.#left = this.open.turns.slice(-1).flatMap(shownAnswers).filter((answer) => answer.steps.at(-1).isLeft);
  }

  // Takes the models of the server. The first time, the answers go on that the page was receiving when it was reloaded,
  // and a message is sent that the user has sent already, unless it has changed since.
  offer(models) {
    this.#models.offer(models);
    if (this.#left.length) this.resume(this.#left.splice(0));
    const early = this.#early;
    this.#early = null;
    if (early && this.#composer.holds(early)) this.send(early.text, early.files);
  }

  // Adapts the page to the chosen models.
  #adapt() {
    this.#settings.offerDefaults(this.#models.all);
    const { complete } = this.#models;
    if (complete) byId("max-tokens").placeholder = COMPLETION_TOKENS;
    if (document.body.classList.contains("completes") === complete) return;
    document.body.classList.toggle("completes", complete);
    this.#offerExamples();
  }

  #offerExamples() {
    byId("examples").replaceChildren(...exampleButtons(this.#models.complete, (text) => this.send(text, [])));
  }

  readsPictures() {
    return this.#models.readsPictures();
  }

  // -- the conversation ----------------------------------------------------------------------------------------------

  // Shows a conversation at its address, unless the browser `isMoved` there already.
  show(conversation, { isMoved = false } = {}) {
    this.open = [...this.#running.values()].find((one) => one.conversation.id === conversation.id)?.conversation ?? conversation;
    const { settings, turns } = this.open;
    if (settings) this.#settings.set(settings);
    if (settings?.models) this.#models.choose(settings.models);
    if (this.#editing !== null) this.#write(NOTHING);
    this.#offerExamples();
    this.#tabs.look();
    this.#draw();
    this.#sidebar.draw();
    document.title = turns.length ? `${this.open.title} · oaiserve` : "oaiserve";
    this.#scrollToEnd();
    const address = addressOf(this.open);
    if (!isMoved && address !== location.hash) history.pushState(null, "", address || location.pathname + location.search);
  }

  begin() {
    this.show(newConversation());
    this.#sidebar.hideDrawer();
    byId("prompt").focus();
  }

  // Drops the open conversation, which has been deleted, and begins a new one.
  drop() {
    this.stop();
    this.open.isGone = true;
    this.begin();
  }

  // Shows what another tab has changed, unless this tab is about to change it, too.
  #follow(key) {
    this.#sidebar.draw();
    if (key !== keyOf(this.open) || this.#receivesOpen || this.#editing !== null) return;
    const found = conversations().find(({ id }) => id === this.open.id);
    if (!found) return;
    const numElsewhere = stepsElsewhere(found).length;
    const isKnown = numElsewhere && numElsewhere === stepsElsewhere(this.open).length && found.turns.length === this.open.turns.length;
    if (isKnown) return; // the other tab says what is new, and the storage has it later
    const follows = this.#isAtEnd;
    this.open = found;
    this.#tabs.look();
    this.#draw();
    if (follows) this.#scrollToEnd();
  }

  // -- answers that another tab receives -----------------------------------------------------------------------------

  // Returns the conversation with this id if this tab receives answers of it.
  receiving(id) {
    return [...this.#running.values()].find(({ conversation }) => conversation.id === id)?.conversation;
  }

  receives(answer) {
    return this.#running.has(answer);
  }

  stopReceiving(id) {
    for (const { conversation, abort } of this.#running.values()) if (conversation.id === id) abort.abort();
  }

  // Draws what another tab has received, or that nobody receives it any more.
  drawElsewhere(hasEnded) {
    this.#drawAnswers(this.#shown);
    if (hasEnded) this.#showState();
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  #draw() {
    this.#shown = [];
    byId("turns").replaceChildren(...this.open.turns.map((turn, place) => this.#turn(turn, place)));
    byId("welcome").hidden = this.open.turns.length > 0;
    this.#showState();
  }

  #turn(turn, place) {
    const files = turn.files.map((file) => this.#file(file));
    const edit = iconButton("edit", "Edit", () => this.edit(place));
    const tools = element("div", { class: "tools" }, ...this.#versions(turn, place), copyButton("Copy", () => turn.text), edit);
    const bubble = element("div", { class: "bubble" }, ...files, ...(turn.text ? folded(turn.text) : []));
    const mark = turn.isEdited ? [element("small", { class: "note edited" }, "Edited")] : [];
    const asked = element("article", { class: "asked", "aria-label": "Your message" }, bubble, ...mark, tools);
    const together = shownAnswers(turn);
    const made = together.map((answer) => {
      const isLast = answer === together.at(-1);
      return new Answer(answer, { all: turn.answers, together, page: this, tools: this.#tools(turn, place, answer, isLast) });
    });
    this.#shown.push(...made);
    const completes = together.length > 0 && together.every(({ given }) => given !== undefined);
    return element("li", { class: completes ? "completed" : "" }, asked, element("div", { class: together.length > 1 ? "answers several" : "answers" }, ...made.map((answer) => answer.element)));
  }

  #file(file) {
    if (file.text === undefined) return element("div", { class: "chip" }, ...chip(file));
    return element("details", {}, element("summary", { class: "chip" }, ...chip(file)), element("pre", { tabindex: "0" }, file.text));
  }

  // Returns the buttons of an answer. Those of the whole turn are at its last one.
  #tools(turn, place, answer, isLast) {
    const copy = copyButton("Copy", () => answer.steps.map(({ message }) => message.content).join("\n\n"));
    const branch = iconButton("branch", "Branch into a new chat", () => this.#branch(place));
    const again = iconButton("again", "Regenerate", () => this.#askAgain(place));
    return isLast ? [...this.#rounds(turn), copy, again, branch] : [copy];
  }

  // Returns arrows between the versions of a message.
  #versions({ versions }, place) {
    if (!versions) return [];
    return arrows("version", versions.at, versions.tails.length, (number) => {
      chooseVersion(this.open, place, number);
      this.#keep(this.open);
      this.#draw();
    });
  }

  // Returns arrows between the answers to a message.
  #rounds(turn) {
    const all = rounds(turn);
    if (all.length < 2) return [];
    return arrows("answer", all.indexOf(shownRound(turn)), all.length, (number) => {
      turn.round = all[number];
      this.#keep(this.open);
      this.#draw();
    });
  }

  #showState() {
    const isBusy = this.#isBusy;
    this.#composer.setBusy(isBusy);
    byId("turns").classList.toggle("busy", isBusy);
  }

  #write(message, editing = null) {
    this.#editing = editing;
    this.#composer.write(message, editing !== null);
  }

  edit(place) {
    this.#write(this.open.turns[place], place);
  }

  editLast() {
    if (this.open.turns.length && !this.#isBusy) this.edit(this.open.turns.length - 1);
  }

  // -- scrolling -----------------------------------------------------------------------------------------------------

  get #isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = byId("scroll");
    return scrollTop + clientHeight > scrollHeight - NEAR_END_PX;
  }

  #scrollToEnd() {
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
    this.#offerEnd();
  }

  #offerEnd() {
    this.#follows = this.#isAtEnd;
    byId("to-end").hidden = this.#follows;
  }

  // -- requests ------------------------------------------------------------------------------------------------------

  get #receivesOpen() {
    return this.receiving(this.open.id) !== undefined;
  }

  // Whether an answer of this conversation is growing, in this tab or in another one
  get #isBusy() {
    return this.#receivesOpen || stepsElsewhere(this.open).some(({ isOpen }) => isOpen);
  }

  // Stops the answers of this conversation, and returns whether there were any, or a message that was being edited.
  stop() {
    const wasActive = this.#isBusy || this.#editing !== null;
    if (!this.#isBusy && this.#editing !== null) this.#write(NOTHING);
    this.stopReceiving(this.open.id);
    if (this.#isBusy) this.#tabs.stop(this.open);
    return wasActive;
  }

  send(written, files) {
    if (this.#isBusy) return;
    if (!this.#models.areKnown) {
      this.#early = { text: written, files };
      if (!this.#composer.holds(this.#early)) this.#write(this.#early); // the text of an example
      return;
    }
    const body = this.bodyNow();
    if (body === null) return;
    const text = this.#models.complete ? written : written.trim();
    const turn = { text, files, answers: [] };
    const hasOwnTitle = this.open.title !== titleOf(this.open.turns[0]);
    if (this.#editing === null) this.open.turns.push(turn);
    else addVersion(this.open, this.#editing, { ...turn, isEdited: true });
    if (!hasOwnTitle) this.open.title = titleOf(this.open.turns[0]);
    document.title = `${this.open.title} · oaiserve`;
    history.replaceState(null, "", addressOf(this.open));
    this.#write(NOTHING);
    this.#askAll(body);
  }

  // Requests another answer to a message. The turns after an earlier message stay as another version.
  #askAgain(place) {
    const body = this.bodyNow();
    if (body === null) return;
    const { text, files } = this.open.turns[place];
    if (place < this.open.turns.length - 1) addVersion(this.open, place, { text, files, answers: [] });
    this.#askAll(body);
  }

  // Copies the conversation up to a turn into a new one.
  #branch(place) {
    const copy = structuredClone({ ...this.open, turns: this.open.turns.slice(0, place + 1) });
    Object.assign(copy, { id: newConversation().id, title: `${this.open.title} (branch)` });
    this.#keep(copy);
    this.show(copy);
    byId("prompt").focus();
  }

  // Requests an answer to the last message from each chosen model.
  #askAll(body) {
    this.open.settings = { ...this.#settings.value(), models: this.#models.chosen() };
    const turn = this.open.turns.at(-1);
    turn.round = Math.max(-1, ...rounds(turn)) + 1;
    const asked = shortly(this.open.settings);
    const added = this.#models.all.map((model) => {
      const answer = { model: model.id, asked, round: turn.round, isLoading: model.is_loaded === false, steps: [] };
      return model.has_chat_template === false ? { ...answer, given: turn.text } : answer;
    });
    turn.answers.push(...added);
    for (const answer of added) this.#ask(answer, body);
    this.#keep(this.open);
    this.#draw();
    this.#scrollToEnd();
  }

  // Returns the fields of a request now, or null if none may be sent.
  bodyNow() {
    if (this.#isBusy) return null;
    showProblem(this.#models.chosen().length ? "" : "No model is chosen. Choose one at the top of the page.");
    return this.#models.chosen().length ? this.#settings.body() : null;
  }

  // Returns whether an answer can go on: it is in the last turn, and the last of its steps has ended too early.
  mayResume(answer) {
    const { isOpen, isCut, isStopped, error, finish } = answer.steps.at(-1);
    const isLimited = finish === "repetition" || (finish === "length" && answer.given !== undefined);
    const hasEndedEarly = !isOpen && Boolean(isCut || isStopped || error || isLimited);
    return hasEndedEarly && !this.#isBusy && this.open.turns.at(-1).answers.includes(answer);
  }

  // Returns whether results of tools may be sent: the answer is complete, and no turn follows it.
  mayGoOn(answer) {
    return !answer.steps.at(-1).isOpen && shownAnswers(this.open.turns.at(-1)).includes(answer);
  }

  // Sends the tool results in the last step of the answer.
  goOn(answer, body) {
    this.#ask(answer, body.tools ? { ...body, tool_choice: "auto" } : body);
    this.#showState();
  }

  // Goes on with answers of the last turn that were cut off or stopped, from the end of their text. One without a text
  // begins again.
  resume(answers) {
    const body = this.bodyNow();
    if (body === null) return;
    for (const answer of answers) {
      const step = answer.steps.pop();
      if (canGoOn(step)) this.#ask(answer, body, reopened(step));
      else this.#ask(answer, body);
    }
    this.#keep(this.open); // for other tabs that show it
    this.#draw();
  }

  // Requests an answer in a step, or the rest of the answer that the step began.
  async #ask(answer, body, begun = null) {
    const step = begun ?? newStep("response_format" in body);
    const conversation = this.open;
    const { model, given } = answer;
    const asked = given === undefined ? { ...body, model, messages: messages(conversation, answer) } : completing({ ...body, model }, given + step.message.content);
    if (begun && asked.messages) {
      asked.messages.push({ role: "assistant", content: begun.message.content });
      Object.assign(asked, { continue_final_message: true, add_generation_prompt: false });
    }
    const abort = new AbortController();
    answer.steps.push(step);
    this.#running.set(answer, { conversation, abort });
    byId("said").textContent = `${answer.model} is answering.`;
    this.#watch();
    await ask(step, asked, abort.signal);
    abort.abort(); // if reading has failed, this stops the server
    delete answer.isLoading;
    this.#running.delete(answer);
    this.#keep(conversation);
    if (conversation !== this.open) return;
    const { content, calls } = step.message;
    byId("said").textContent = `${answer.model}: ${step.error?.message ?? (content || calls.map(({ name }) => `calls ${name}`).join(", "))}`;
    this.#drawAnswers(this.#shown);
    this.#showState();
  }

  // Draws and stores the running answers until none is left.
  #watch() {
    let keptMs = Date.now();
    this.drawing ??= setInterval(() => {
      this.#drawAnswers(this.#shown.filter(({ answer }) => this.#running.has(answer)));
      if (!this.#running.size) this.drawing = clearInterval(this.drawing);
      if (Date.now() - keptMs < KEEP_MS) return;
      this.#keepRunning();
      keptMs = Date.now();
    }, DRAW_MS);
  }

  #keepRunning() {
    for (const conversation of new Set([...this.#running.values()].map((one) => one.conversation))) this.#store(conversation);
  }

  // Ends the answers of a page that the user leaves, and stores what there is of them, to go on after a reload.
  #leave() {
    for (const answer of this.#running.keys()) Object.assign(answer.steps.at(-1), { isCut: true, isLeft: true });
    this.#keepRunning();
    for (const { abort } of this.#running.values()) abort.abort();
  }

  // Draws answers, and keeps the end in sight if it was.
  #drawAnswers(answers) {
    const follows = this.#isAtEnd;
    for (const answer of answers) answer.draw();
    if (follows) this.#scrollToEnd();
    else this.#offerEnd();
  }

  #keep(conversation) {
    conversation.changedMs = Date.now();
    this.#store(conversation);
    this.#sidebar.draw();
  }

  #store(conversation) {
    if (conversation.isGone || !conversation.turns.length) return;
    try {
      if (!keep(conversation)) showProblem("This browser has no room for this chat's pictures. They will be lost when you close the page.");
    } catch (error) {
      showProblem(`This browser has no room for this chat (${error.name}). Delete another one.`);
    }
  }
}

// Returns the text of a message, of which a long one is folded.
function folded(text) {
  const box = element("div", { class: "text" }, text);
  if (text.length < LONG_CHARACTERS && text.split("\n").length < LONG_LINES) return [box];
  box.classList.add("folded");
  const button = element("button", { type: "button", class: "link", "aria-expanded": "false" }, "Show all");
  button.addEventListener("click", () => {
    const isFolded = box.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!isFolded));
    button.textContent = isFolded ? "Show all" : "Show less";
  });
  return [box, button];
}

// Returns the title of a conversation that begins with a turn, if the user gives it no other.
function titleOf({ text, files } = NOTHING) {
  const title = text || files[0]?.name || "";
  return title.length > TITLE_CHARACTERS ? `${title.slice(0, TITLE_CHARACTERS)}…` : title;
}

// Returns the fragment of a conversation's address; a new one has none.
function addressOf({ id, turns }) {
  return turns.length ? `#chat=${id}` : "";
}

// Returns the stored conversation of the page's address, or undefined.
function addressed() {
  return conversations().find((conversation) => location.hash === addressOf(conversation));
}

function arrows(kind, at, length, choose) {
  const move = (name, label, to) => iconButton(name, `${label} ${kind}`, () => choose(to), to < 0 || to >= length ? { disabled: "" } : {});
  return [move("previous", "Previous", at - 1), element("span", { class: "place" }, `${at + 1}/${length}`), move("next", "Next", at + 1)];
}

drawIcons();
const chat = new Chat();
let timer = null;
let lookedMs = -Infinity; // when the server was asked for its models

// Asks for the models now and then, and in between often whether the server is there.
async function load() {
  clearTimeout(timer);
  const isLost = byId("status").dataset.state !== "live";
  try {
    if (isLost || performance.now() - lookedMs > LOOK_MS) {
      const { data } = await requestJson("v1/models");
      lookedMs = performance.now();
      showMain();
      setStatus("live", "Connected");
      chat.offer(data);
    } else await reach(new URL("health", ROOT), {});
  } catch (error) {
    if (error.needsKey) return;
    showLost();
  }
  clearTimeout(timer);
  timer = setTimeout(load, byId("status").dataset.state === "live" ? HEALTH_MS : RETRY_MS);
}

document.addEventListener("lost", () => {
  showLost();
  clearTimeout(timer);
  timer = setTimeout(load, RETRY_MS);
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : load()));
start(load, () => clearTimeout(timer));
