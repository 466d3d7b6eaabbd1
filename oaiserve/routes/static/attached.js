// The text files and pictures that go with the next message.

import { byId, element, showProblem } from "./show.js";

const MOST_BYTES = 2 ** 20; // of a text
const MOST_PIXELS = 2000; // of the longer side of a picture: larger ones are scaled down
const SENT_AS_THEY_ARE = ["image/jpeg", "image/png", "image/webp"];

export class Attached {
  files = []; // each with a name, and a text or the data URL of a picture
  #readsPictures;

  // `readsPictures()` tells whether the chosen models do.
  constructor(readsPictures) {
    this.#readsPictures = readsPictures;
    for (const box of [byId("attach"), byId("camera")]) {
      box.addEventListener("change", () => {
        const chosen = [...box.files];
        box.value = ""; // so that the same file can be chosen again
        this.#addAll(chosen);
      });
    }
    byId("prompt").addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    byId("chat").addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    byId("chat").addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault(); // or nothing could be dropped
    });
  }

  set(files) {
    this.files = files;
    const items = files.map((file) => {
      const remove = () => this.set(this.files.filter((other) => other !== file));
      const label = `Remove ${file.name}`;
      return element("li", {}, thumbnail(file) ?? file.name, " ", element("button", { type: "button", "aria-label": label, onclick: remove }, "Remove"));
    });
    byId("attached").replaceChildren(...items);
  }

  // Takes what is pasted or dropped, unless it is text: spreadsheets paste a picture of it, too.
  #take(event, { files, types }) {
    if (!files.length || types.includes("text/plain")) return;
    event.preventDefault();
    this.#addAll([...files]);
  }

  async #addAll(files) {
    showProblem("");
    for (const file of files) {
      const isPicture = file.type.startsWith("image/") && this.#readsPictures();
      try {
        const read = isPicture ? { url: await pictureOf(file) } : { text: await textOf(file) };
        this.set([...this.files, { name: file.name, ...read }]);
      } catch (error) {
        showProblem(`${file.name} cannot be attached: ${error.message}.`);
      }
    }
  }
}

// Returns the element of a picture, and null for a text.
export function thumbnail({ name, text, url }) {
  if (text !== undefined) return null;
  return url ? element("img", { src: url, alt: name, title: name }) : element("span", { class: "note" }, `${name}, which this browser had no room for`);
}

async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`it has ${file.size} bytes, and a text may have ${MOST_BYTES}`);
  const bytes = await file.arrayBuffer();
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("it is no text in UTF-8, and the models here read nothing else");
  }
}

// Returns the data URL of a picture, which is scaled down if it is large.
async function pictureOf(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("this browser cannot read the picture");
  });
  const scale = MOST_PIXELS / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1 && SENT_AS_THEY_ARE.includes(file.type)) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const [width, height] = [bitmap.width, bitmap.height].map((pixels) => Math.max(1, Math.round(pixels * Math.min(1, scale))));
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  const isPng = file.type === "image/png";
  context.fillStyle = "white"; // behind what is transparent: a JPEG has nothing else for it
  if (!isPng) context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL(isPng ? "image/png" : "image/jpeg", 0.9);
}
