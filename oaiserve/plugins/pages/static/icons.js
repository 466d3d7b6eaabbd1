// The icons of buttons: those that scripts make, and those that the page names in `data-icon`.

import { copyOnClick } from "./copy.js";
import { element } from "./show.js";

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  branch: "M6 9v12M6 9a3 3 0 1 0-.01 0zM18 9a3 3 0 1 0-.01 0zM18 9c0 5-5 6-12 6",
  check: "M5 12.5l4.5 4.5L19 7",
  clip: "M20 12l-7.5 7.5a5 5 0 0 1-7-7L13 5a3.3 3.3 0 0 1 4.7 4.7L10 17.3a1.7 1.7 0 0 1-2.4-2.4L14 8.5",
  copy: "M9 11a2 2 0 0 1 2-2h7a2 2 0 0 1 2 2v7a2 2 0 0 1-2 2h-7a2 2 0 0 1-2-2zM5 15V6a2 2 0 0 1 2-2h8",
  cross: "M6 6l12 12M18 6L6 18",
  dark: "M20 14a8.5 8.5 0 1 1-10-10a7 7 0 0 0 10 10z",
  down: "M12 5v14M5 12l7 7 7-7",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  file: "M7 3h7l5 5v13H7zM14 3v5h5",
  help: "M9 9a3 3 0 1 1 4 2.8c-.7.3-1 .8-1 1.7M12 17.5v.1M3 12a9 9 0 1 0 18 0a9 9 0 1 0-18 0",
  light: "M8 12a4 4 0 1 0 8 0a4 4 0 1 0-8 0M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M19 5l-2 2M7 17l-2 2",
  next: "M9 5l7 7-7 7",
  open: "M12 16V4M7 9l5-5 5 5M5 20h14",
  plus: "M12 5v14M5 12h14",
  previous: "M15 5l-7 7 7 7",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  settings: "M4 7h10M18 7h2M4 17h4M12 17h8M14 7a2 2 0 1 0 4 0a2 2 0 1 0-4 0M8 17a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  sidebar: "M6 4h12a3 3 0 0 1 3 3v10a3 3 0 0 1-3 3H6a3 3 0 0 1-3-3V7a3 3 0 0 1 3-3zM9 4v16",
  system: "M4 5h16v11H4zM12 16v4M8 20h8",
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

export function iconButton(name, label, onclick = null, attributes = {}) {
  const button = element("button", { type: "button", class: "icon", "aria-label": label, title: label, ...attributes }, icon(name));
  if (onclick) button.addEventListener("click", onclick);
  return button;
}

export function drawIcons() {
  for (const button of document.querySelectorAll("[data-icon]")) button.prepend(icon(button.dataset.icon));
}

export function copyButton(label, text) {
  const button = iconButton("copy", label);
  const show = (result) => {
    button.replaceChildren(icon(result === "Copied" ? "check" : result ? "cross" : "copy"));
    button.ariaLabel = result ?? label;
    button.title = button.ariaLabel;
  };
  copyOnClick(button, text, show);
  return button;
}
