// What each page does: it asks for an API key where the server requires one, and hides links that lead nowhere.

import { byId, element, setStatus, showProblem } from "./show.js";
import { hasKey, keepKey, request } from "./sse.js";

const NOT_A_KEY = "An API key has only ASCII letters, digits and punctuation, and no spaces.";

// Calls `load`, and calls it again whenever the user has entered a key. `stop` is called while the page waits for one.
export async function start(load, stop = () => {}) {
  const form = keyForm();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (!/^[!-~]+$/.test(key)) return showProblem(NOT_A_KEY);
    keepKey(key);
    byId("key").value = "";
    load();
  });
  document.addEventListener("needs-key", ({ detail }) => {
    stop();
    setStatus("waiting", "Waiting for an API key");
    showProblem(hasKey() ? `${detail} Please enter another one.` : "");
    form.hidden = false;
    byId("main").hidden = true;
    byId("key").focus();
  });
  if (!(await isMissingKey())) load();
}

// Shows the page once a request has been answered, so that the key is right or there is none.
export function showMain() {
  byId("key-form").hidden = true;
  byId("main").hidden = false;
}

// Asks for the key before any request would be refused for want of one.
async function isMissingKey() {
  const asked = request("", { headers: { accept: "application/json" } });
  const about = await asked.then((response) => response.json()).catch(() => ({})); // `load` reports a lost connection
  for (const link of document.querySelectorAll("[data-shows-requests]")) link.hidden = about.links?.page === undefined;
  const isMissing = about.needs_key === true && !hasKey();
  if (isMissing) document.dispatchEvent(new CustomEvent("needs-key"));
  return isMissing;
}

function keyForm() {
  const [flag, command] = ["--api-key", "oaiserve keys add NAME"].map((text) => element("code", {}, text));
  const where = ["It is the key that the server was started with (", flag, "), or one that ", command, " has made. If you don't run the server, ask the person who does."];
  const form = element(
    "form",
    { id: "key-form", class: "card key-card", hidden: "" },
    element("label", { for: "key" }, "This server requires an API key."),
    element("p", { class: "note", id: "key-where" }, ...where),
    element("input", { id: "key", type: "password", autocomplete: "off", required: "", "aria-describedby": "key-where problem" }),
    element("button", { type: "submit", class: "primary" }, "Continue"),
    element("p", { class: "note" }, "This browser tab keeps the key until you close it."),
  );
  byId("main").before(form);
  return form;
}
