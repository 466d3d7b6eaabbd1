// The keys of the chat page, and the dialog that lists them.

import { byId } from "./show.js";

export function offerShortcuts({ page, sidebar }) {
  const help = byId("help");
  const toggleSettings = (isOpen) => {
    const settings = byId("settings");
    const hadFocus = settings.contains(document.activeElement);
    settings.hidden = !isOpen;
    byId("settings-button").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("close-settings").focus();
    else if (hadFocus) byId("settings-button").focus();
  };
  byId("settings-button").addEventListener("click", () => toggleSettings(byId("settings").hidden));
  byId("settings-summary").addEventListener("click", () => toggleSettings(true));
  byId("close-settings").addEventListener("click", () => toggleSettings(false));
  byId("help-button").addEventListener("click", () => help.showModal());

  const keys = {
    k: () => {
      sidebar.toggle(true);
      byId("search").focus();
    },
    o: () => page.begin(),
    ",": () => toggleSettings(byId("settings").hidden),
    "/": () => help.showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (help.open) return;
    if (event.key === "Escape") {
      if (byId("picker").matches(":popover-open")) return; // Escape closes it
      if (!sidebar.hideDrawer() && !page.stop() && !byId("settings").hidden) toggleSettings(false);
    }
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const isShifted = event.key.toLowerCase() === "o"; // without Shift it opens a file
    const action = keys[event.key.toLowerCase()];
    if (!action || event.shiftKey !== isShifted) return;
    event.preventDefault();
    action();
  });
}
