// What all pages share: how they load, the card that asks for an API key, and links that are hidden where they lead
// nowhere.

import { byId, element, RETRY_MS, setStatus, showLost, showProblem } from "./show.js";
import { askForKey, hasKey, keepKey, Refused, requestJson } from "./sse.js";

const NOT_A_KEY = "An API key has only ASCII letters, digits and punctuation, and no spaces.";

// Loads a page while it is visible: `show` gets what `fetchNow` returns. It returns the ms until the next load, or nothing
// if this was the last. If a load fails, the page says so and tries again. Returns a function that loads at once.
export function keepLoading(fetchNow, show) {
  let timer = null;
  let numLoads = 0; // an answer to an earlier load than the last comes too late
  const stop = () => clearTimeout(timer);
  async function load() {
    stop();
    const mine = ++numLoads;
    let waitMs = RETRY_MS;
    try {
      const found = await fetchNow();
      if (mine !== numLoads) return;
      showMain();
      showProblem("");
      setStatus("live", "Connected");
      waitMs = show(found);
    } catch (error) {
      if (error.needsKey || mine !== numLoads) return;
      if (error.lacksRight && hasKey()) return askForKey(error);
      showLost();
      if (error instanceof Refused) showProblem(error.message);
      else if (error instanceof TypeError) throw error; // of this script
    }
    if (waitMs && !document.hidden) timer = setTimeout(load, waitMs);
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : load()));
  start(load, stop);
  return load;
}

// Calls `load`, and calls it again whenever the user has entered a key. `stop` is called while the page waits for one.
export async function start(load, stop = () => {}) {
  const form = keyForm();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (!/^[!-~]+$/.test(key)) return showProblem(NOT_A_KEY);
    keepKey(key);
    byId("key").value = "";
    showProblem("");
    load();
  });
  document.addEventListener("needs-key", ({ detail }) => {
    stop();
    setStatus("waiting", "Waiting for an API key");
    showProblem(hasKey() ? `${detail} Please enter another key.` : "");
    form.hidden = false;
    byId("main").hidden = true;
    byId("key").focus();
  });
  if (!(await isMissingKey())) load();
}

// Shows the page after the first answer, which proves that the key is right or that none is needed.
export function showMain() {
  byId("key-form").hidden = true;
  byId("main").hidden = false;
}

// Asks for the key before a request is refused because it has none. Returns whether it has asked.
async function isMissingKey() {
  const about = await requestJson("").catch(() => null); // `load` reports a lost connection
  if (!about) return false;
  for (const link of document.querySelectorAll("[data-shows-requests]")) link.hidden = about.links.page === undefined;
  for (const link of document.querySelectorAll("[data-shows-api]")) link.hidden = about.links.docs === undefined;
  const isMissing = about.needs_key && !hasKey();
  if (isMissing) document.dispatchEvent(new CustomEvent("needs-key"));
  return isMissing;
}

function keyForm() {
  const [flag, command] = ["--api-key", "oaiserve keys add NAME"].map((text) => element("code", {}, text));
  const where = ["Enter a key that the server was started with (", flag, "), or one that was created with ", command, ". If you don't run this server, ask its operator."];
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
