// Copies texts to the clipboard.

import { element } from "./show.js";

const SHOWN_MS = 2000; // for which a button shows the result

// Makes a button copy the text that `text()` returns. `show` is called with the result in words, and later with null.
export function copyOnClick(button, text, show) {
  button.addEventListener("click", async () => {
    const isCopied = await copy(text());
    show(isCopied ? "Copied" : "Not copied: the browser does not allow it");
    setTimeout(() => show(null), SHOWN_MS);
  });
}

// Copies a text, and returns whether the browser allowed it. Without HTTPS, only pages of this machine have a
// clipboard; other pages copy a selection.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const focused = document.activeElement;
  const box = document.body.appendChild(element("textarea", { class: "unseen" }, text));
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  focused.focus();
  return isCopied;
}
