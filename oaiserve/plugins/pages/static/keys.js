// Shows admins the stored keys and their use, and updates both every few seconds while the list is open.

import { byId, element, number, numberCell } from "./show.js";
import { hasKey, requestJson } from "./sse.js";

const EVERY_MS = 5000;
const LIMITS = ["requests_per_minute", "tokens_per_minute", "requests_per_day", "tokens_per_day", "cost_per_day"];
const list = byId("key-list");
let timer = null;

export function offerKeys() {
  list.hidden = !hasKey();
}

function row(key) {
  const limits = LIMITS.filter((name) => key[name] !== null).map((name) => `${number(key[name])} ${name.replace("_per_", "/")}`);
  const used = [number(key.requests_today), number(key.tokens_today), Number(key.cost_today.toPrecision(3))];
  const last = key.last_used === null ? "never" : new Date(key.last_used * 1000).toLocaleString();
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, key.name),
    element("td", {}, key.revoked === null ? key.role : "revoked"),
    element("td", {}, limits.join(", ") || "none"),
    ...used.map((text) => numberCell(String(text))),
    element("td", {}, last),
  );
}

async function look() {
  clearTimeout(timer);
  if (!list.open) return;
  try {
    const { keys } = await requestJson("admin/keys");
    byId("key-rows").replaceChildren(...keys.map(row));
    byId("key-note").textContent = "Use the command oaiserve keys to create, change and revoke keys. Today began at midnight UTC.";
    timer = setTimeout(look, EVERY_MS);
  } catch (error) {
    byId("key-note").textContent = error.message;
  }
}

list.addEventListener("toggle", look);
