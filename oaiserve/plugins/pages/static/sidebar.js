// The list of conversations, by day and with a search. On a phone it is a drawer.

import { asMarkdown, conversations, forget, fromMarkdown, keep } from "./conversations.js";
import { iconButton } from "./icons.js";
import { byId, element, phone, saveAs, showProblem } from "./show.js";

const DAY_MS = 86_400_000;
const UNDO_MS = 8000;

export class Sidebar {
  // `page` has the `open` conversation, and `show(conversation)`, `begin()` and `drop()`.
  constructor(page) {
    this.page = page;
    byId("search").addEventListener("input", () => this.draw());
    byId("show-sidebar").addEventListener("click", () => this.toggle(true));
    byId("hide-sidebar").addEventListener("click", () => this.toggle(false));
    byId("shade").addEventListener("click", () => this.toggle(false));
    byId("import-button").addEventListener("click", () => byId("import").click());
    byId("import").addEventListener("change", () => this.#import([...byId("import").files]));
    phone.addEventListener("change", () => this.toggle(!phone.matches));
    this.toggle(!phone.matches);
  }

  toggle(isOpen) {
    const hadFocus = byId("sidebar").contains(document.activeElement);
    byId("sidebar").hidden = !isOpen;
    byId("show-sidebar").hidden = isOpen && !phone.matches;
    byId("show-sidebar").setAttribute("aria-expanded", String(isOpen));
    byId("shade").hidden = !isOpen || !phone.matches;
    byId("chat").inert = isOpen && phone.matches;
    if (isOpen && phone.matches) byId("hide-sidebar").focus();
    else if (hadFocus) byId("show-sidebar").focus();
  }

  // Hides the drawer of a phone, and returns whether it was open.
  hideDrawer() {
    const isDrawer = phone.matches && !byId("sidebar").hidden;
    if (isDrawer) this.toggle(false);
    return isDrawer;
  }

  draw() {
    if (byId("conversation-list").querySelector("input")) return; // a chat is being renamed
    const wanted = byId("search").value.trim().toLowerCase();
    const found = conversations().filter((conversation) => !wanted || textOf(conversation).includes(wanted));
    const days = Map.groupBy(found, ({ changedMs }) => dayOf(changedMs));
    const lists = [...days].map(([day, ones]) => [element("h2", {}, day), element("ul", {}, ...ones.map((one) => this.#item(one)))]);
    const none = element("p", { class: "note" }, wanted ? "No chats match." : "Your chats appear here.");
    const { activeElement: focused } = document;
    const { id } = focused.closest("#conversation-list li")?.dataset ?? {};
    byId("conversation-list").replaceChildren(...(found.length ? lists.flat() : [none]));
    const item = [...byId("conversation-list").querySelectorAll("li")].find((one) => one.dataset.id === id);
    [...(item?.querySelectorAll("button") ?? [])].find((button) => button.ariaLabel === focused.ariaLabel)?.focus();
  }

  #item(conversation) {
    const { title, id } = conversation;
    const isOpen = id === this.page.open.id;
    const show = () => {
      this.page.show(conversation);
      this.hideDrawer();
    };
    const button = element("button", { type: "button", class: "talk", dir: "auto", onclick: show, ...(isOpen ? { "aria-current": "true" } : {}) }, title);
    const item = element("li", { "data-id": id }, button);
    const changes = [
      iconButton("edit", `Rename ${title}`, () => this.#rename(conversation, item)),
      iconButton("save", `Export ${title}`, () => download(conversation)),
      iconButton("trash", `Delete ${title}`, () => this.#delete(conversation)),
    ];
    item.append(element("div", { class: "changes" }, ...changes));
    return item;
  }

  #rename(conversation, item) {
    const box = element("input", { class: "talk", value: conversation.title, "aria-label": "Name of the chat" });
    const end = (isKept) => {
      box.onblur = null;
      box.remove();
      const title = box.value.trim();
      if (isKept && title) {
        conversation.title = title;
        if (conversation.id === this.page.open.id) this.page.open.title = title;
        keep(conversation);
      }
      this.draw();
    };
    box.onblur = () => end(true);
    box.addEventListener("keydown", (event) => {
      if (!["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      end(event.key === "Enter");
      byId("conversation-list").querySelector("[aria-current]")?.focus();
    });
    item.replaceChildren(box);
    box.select();
  }

  // Stores and shows exported chats. One that cannot be shown is not stored.
  async #import(files) {
    byId("import").value = ""; // so that the same file can be chosen again
    showProblem("");
    for (const file of files) {
      try {
        const conversation = fromMarkdown(await file.text());
        this.page.show(conversation);
        keep(conversation);
      } catch (error) {
        this.page.begin();
        showProblem(`${file.name} cannot be imported: ${error.message}.`);
      }
    }
    this.draw();
    this.hideDrawer();
  }

  #delete(conversation) {
    const wasOpen = conversation.id === this.page.open.id;
    if (wasOpen) this.page.drop();
    forget(conversation);
    this.draw();
    this.#offerUndo(conversation, wasOpen);
  }

  #offerUndo(conversation, wasOpen) {
    const undo = () => {
      keep(conversation);
      this.draw();
      if (wasOpen) this.page.show(conversation);
      byId("notice").hidden = true;
      byId("conversation-list").querySelector(`[data-id="${conversation.id}"] button`)?.focus();
    };
    const button = element("button", { type: "button", class: "link", onclick: undo }, "Undo");
    byId("notice").replaceChildren(`Deleted “${conversation.title}”. `, button);
    byId("notice").hidden = false;
    button.focus();
    clearTimeout(this.undoing);
    this.undoing = setTimeout(() => (byId("notice").hidden = true), UNDO_MS);
  }
}

function textOf({ title, turns }) {
  const said = turns.flatMap(({ text, answers }) => [text, ...answers.flatMap(({ steps }) => steps.map(({ message }) => message.content))]);
  return [title, ...said].join("\n").toLowerCase();
}

function dayOf(ms) {
  const days = Math.round((new Date().setHours(0, 0, 0, 0) - new Date(ms).setHours(0, 0, 0, 0)) / DAY_MS);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < 7) return "Previous 7 days";
  return new Date(ms).toLocaleDateString("en", { month: "long", year: "numeric" });
}

function download(conversation) {
  const name = conversation.title.replace(/[^\p{L}\p{N} _-]/gu, "").slice(0, 60) || "chat";
  saveAs(`${name}.md`, new Blob([asMarkdown(conversation)], { type: "text/markdown" }));
}
