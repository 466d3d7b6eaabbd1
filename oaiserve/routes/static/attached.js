// The text files that go with the next message.

import { byId, element, showProblem } from "./show.js";

const MOST_BYTES = 2 ** 20;

export class Attached {
  files = []; // each with a name and a text

  constructor() {
    byId("attach").addEventListener("change", async () => {
      const chosen = [...byId("attach").files];
      byId("attach").value = ""; // so that the same file can be chosen again
      for (const file of chosen) await this.#add(file);
    });
  }

  set(files) {
    this.files = files;
    const items = files.map((file) => {
      const remove = () => this.set(this.files.filter((other) => other !== file));
      const label = `Remove ${file.name}`;
      return element("li", {}, file.name, " ", element("button", { type: "button", "aria-label": label, onclick: remove }, "Remove"));
    });
    byId("attached").replaceChildren(...items);
  }

  async #add(file) {
    showProblem("");
    if (file.size > MOST_BYTES) return showProblem(`${file.name} has ${file.size} bytes; a file may have ${MOST_BYTES}.`);
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      this.set([...this.files, { name: file.name, text }]);
    } catch (error) {
      const why = error instanceof TypeError ? "it is no text in UTF-8, and the models here read nothing else" : error.message;
      showProblem(`${file.name} cannot be attached: ${why}.`);
    }
  }
}
