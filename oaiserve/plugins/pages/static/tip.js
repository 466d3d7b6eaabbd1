// Shows a box with details next to the element under the pointer or with the focus.

import { byId, element } from "./show.js";

const GAP = 12; // pixels between the pointer and the box

// Shows the nodes that `describe` returns for an element in `list` that matches `selector`. They are hidden from screen
// readers, which find the same on the page of the request.
export function showTips(list, selector, describe) {
  const box = byId("tip") ?? document.body.appendChild(element("div", { id: "tip", class: "card", "aria-hidden": "true", hidden: "" }));
  const hide = () => (box.hidden = true);
  const show = (target, x, y) => {
    box.replaceChildren(...describe(target));
    box.hidden = false;
    box.style.left = `${Math.max(0, Math.min(x + GAP, innerWidth - box.offsetWidth - GAP))}px`;
    box.style.top = `${y + GAP + box.offsetHeight > innerHeight ? Math.max(0, y - GAP - box.offsetHeight) : y + GAP}px`;
  };
  list.addEventListener("pointermove", (event) => {
    const target = event.pointerType === "mouse" ? event.target.closest(selector) : null;
    if (target) show(target, event.clientX, event.clientY);
    else hide();
  });
  list.addEventListener("focusin", ({ target }) => {
    const found = target.matches(":focus-visible") ? target.querySelector(selector) : null;
    if (found) show(found, found.getBoundingClientRect().left, found.getBoundingClientRect().bottom);
  });
  for (const type of ["pointerleave", "focusout"]) list.addEventListener(type, hide);
  document.addEventListener("keydown", ({ key }) => key === "Escape" && hide());
}
