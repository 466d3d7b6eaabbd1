// The box at the bottom of the chat: the message, its files, and the button that is Send or Stop.

import { Attached } from "./attached.js";
import { byId } from "./show.js";

const MOST_HEIGHT_SHARE = 0.4; // of the window

export class Composer {
  // `page` has `send(text, files)`, `stop()`, `editLast()` and `readsPictures()`.
  constructor(page) {
    this.attached = new Attached(() => page.readsPictures());
    this.box = byId("prompt");
    const form = byId("chat-form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.box.value;
      if (text.trim() || this.attached.files.length) page.send(text, this.attached.files);
    });
    byId("send").addEventListener("click", (event) => {
      if (!this.isBusy) return;
      event.preventDefault();
      page.stop();
    });
    this.box.addEventListener("input", () => this.#grow());
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.box.value) {
        event.preventDefault();
        page.editLast();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    window.addEventListener("resize", () => this.#grow());
  }

  // Puts a message into the box. With `isEdit`, it replaces an earlier one when it is sent.
  write({ text, files }, isEdit = false) {
    this.box.value = text;
    this.attached.set(files);
    byId("editing").hidden = !isEdit;
    this.#grow();
    this.box.focus();
  }

  // Returns whether the box has this message.
  holds({ text, files }) {
    return this.box.value === text && this.attached.files === files;
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    const button = byId("send");
    button.dataset.state = isBusy ? "stop" : "send";
    button.disabled = false; // the page disables it until this script runs
    button.ariaLabel = isBusy ? "Stop" : "Send";
    button.title = button.ariaLabel;
  }

  #grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, innerHeight * MOST_HEIGHT_SHARE)}px`;
  }
}
