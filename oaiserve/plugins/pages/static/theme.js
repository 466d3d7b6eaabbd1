// Shows a page in the theme that the user has chosen: light, dark, or that of the system. Runs before the page is drawn.

import { iconButton } from "./icons.js";
import { byId } from "./show.js";
import { local } from "./storage.js";

const STORED = "oaiserve-theme";
const THEMES = { system: "light dark", light: "light", dark: "dark" }; // the colour schemes of each
const NAMES = Object.keys(THEMES);
const chosen = () => (local.getItem(STORED) in THEMES ? local.getItem(STORED) : "system");

function show() {
  const name = chosen();
  const next = NAMES[(NAMES.indexOf(name) + 1) % NAMES.length];
  document.documentElement.style.colorScheme = THEMES[name];
  const button = iconButton(name, `Theme: ${name}. Change to ${next}`, () => {
    local.setItem(STORED, next);
    show();
    byId("theme").focus();
  }, { id: "theme" });
  if (byId("theme")) byId("theme").replaceWith(button);
  else byId("status").after(button);
  document.dispatchEvent(new Event("theme"));
}

show();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
window.addEventListener("storage", ({ key }) => key === STORED && show());
