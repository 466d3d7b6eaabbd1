// The icons of buttons that scripts make.

import { element } from "./show.js";

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  branch: "M6 9v12M6 9a3 3 0 1 0-.01 0zM18 9a3 3 0 1 0-.01 0zM18 9c0 5-5 6-12 6",
  check: "M5 12.5l4.5 4.5L19 7",
  copy: "M9 11a2 2 0 0 1 2-2h7a2 2 0 0 1 2 2v7a2 2 0 0 1-2 2h-7a2 2 0 0 1-2-2zM5 15V6a2 2 0 0 1 2-2h8",
  cross: "M6 6l12 12M18 6L6 18",
  down: "M12 5v14M5 12l7 7 7-7",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  file: "M7 3h7l5 5v13H7zM14 3v5h5",
  next: "M9 5l7 7-7 7",
  previous: "M15 5l-7 7 7 7",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = svg.appendChild(document.createElementNS(SVG, "path"));
  path.setAttribute("d", PATHS[name]);
  return svg;
}

export function iconButton(name, label, onclick, attributes = {}) {
  return element("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

// Returns a button that copies a text. Without HTTPS, pages of other machines have no clipboard but the selection's.
export function copyButton(label, text) {
  const copy = async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else {
      const box = document.body.appendChild(element("textarea", { class: "unseen" }, text()));
      box.select();
      document.execCommand("copy");
      box.remove();
      button.focus();
    }
    show("check", "Copied");
    setTimeout(() => show("copy", label), 2000);
  };
  const show = (name, said) => {
    button.replaceChildren(icon(name));
    button.setAttribute("aria-label", said);
    button.title = said;
  };
  const button = iconButton("copy", label, copy);
  return button;
}
