// The text files and pictures that go with the next message.

import { icon, iconButton } from "./icons.js";
import { byId, element } from "./show.js";

const MOST_BYTES = 2 ** 20; // of a text
const MOST_PIXELS = 2000; // of the longer side of a picture: larger ones are scaled down
const SENT_AS_THEY_ARE = ["image/jpeg", "image/png", "image/webp"];
const MEDIA = { image: "a picture", audio: "a sound", video: "a video" };

export class Attached {
  files = []; // each with a name, and a text or the data URL of a picture
  #readsPictures;

  // `readsPictures()` returns whether the chosen models read pictures.
  constructor(readsPictures) {
    this.#readsPictures = readsPictures;
    const box = byId("attach");
    byId("attach-button").addEventListener("click", () => box.click());
    byId("close-attach-problem").addEventListener("click", () => {
      this.#showProblem("");
      byId("prompt").focus();
    });
    box.addEventListener("change", () => {
      const chosen = [...box.files];
      box.value = ""; // so that the same file can be chosen again
      this.#addAll(chosen);
    });
    byId("prompt").addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    byId("chat").addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    byId("chat").addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault(); // without this, the browser opens the file
    });
  }

  set(files) {
    this.files = files;
    this.#showProblem("");
    const items = files.map((file) => {
      const remove = () => this.set(this.files.filter((other) => other !== file));
      return element("li", { class: "chip" }, ...chip(file), iconButton("cross", `Remove ${file.name}`, remove));
    });
    byId("attached").replaceChildren(...items);
  }

  // Attaches pasted or dropped files, unless there is text as well: spreadsheets add a picture of it.
  #take(event, { files, types }) {
    if (!files.length || types.includes("text/plain")) return;
    event.preventDefault();
    this.#addAll([...files]);
  }

  async #addAll(files) {
    const problems = [];
    for (const file of files) {
      const readsPictures = this.#readsPictures();
      const isPicture = file.type.startsWith("image/") && readsPictures;
      try {
        const read = isPicture ? { url: await pictureOf(file) } : { text: await textOf(file, readsPictures ? "text and pictures" : "text") };
        this.set([...this.files, { name: file.name, ...read }]);
      } catch (error) {
        problems.push(`${file.name} cannot be attached: ${error.message}.`);
      }
    }
    this.#showProblem(problems.join(" "));
  }

  #showProblem(problem) {
    byId("attach-problem-text").textContent = problem;
    byId("attach-problem").hidden = !problem;
  }
}

// Returns nodes for a file: the picture itself, or an icon with the name and the size of a text.
export function chip({ name, text, url }) {
  if (url) return [element("img", { src: url, alt: name, title: name })];
  const size = text === undefined ? "this browser had no room for it" : shownSize(new Blob([text]).size);
  return [icon("file"), element("span", {}, `${name} · ${size}`)];
}

function shownSize(numBytes) {
  return numBytes < 1000 ? `${numBytes} B` : `${(numBytes / 1000).toFixed(numBytes < 10_000 ? 1 : 0)} kB`;
}

// Returns the text of a file. Throws an error that says what the model reads instead.
async function textOf(file, readable) {
  if (/\.pdf$/i.test(file.name)) throw new Error("this page does not read PDF. Copy its text into the message, or attach it as a text file (pdftotext makes one)");
  const [kind] = file.type.split("/");
  if (MEDIA[kind] && file.type !== "image/svg+xml") throw new Error(`it is ${MEDIA[kind]}, and this model reads only ${readable}`);
  if (file.size > MOST_BYTES) throw new Error(`it has ${shownSize(file.size)}, and a text file may have at most ${shownSize(MOST_BYTES)}`);
  const bytes = await file.arrayBuffer();
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error(`it is not a text in UTF-8, and this model reads only ${readable}`);
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
  context.fillStyle = "white"; // for transparent pixels, which a JPEG cannot have
  if (!isPng) context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL(isPng ? "image/png" : "image/jpeg", 0.9);
}
