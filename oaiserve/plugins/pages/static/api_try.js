// A form that sends a request to a route from the page.

import { folded, resolved, typeOf } from "./api_schema.js";
import { exampleBody, filled, media } from "./api_snippets.js";
import { count, duration, element, facts, indented } from "./show.js";
import { pageOf, reach, readNext, ROOT } from "./sse.js";

const MOST_CHARACTERS = 200_000; // of an answer that is shown

// Returns a form that sends a request to the route, and shows the answer as it arrives.
export function tryForm(route, model) {
  const { method, path, operation } = route;
  const body = exampleBody(route, model);
  const form = media(route, "multipart/form-data");
  const streams = body && "text/event-stream" in operation.responses[200].content;
  const inputs = element("div", { class: "inputs" });
  const fields = { path: {}, query: {}, form: {} };
  for (const { name, in: where, schema, description = "" } of operation.parameters ?? []) {
    const value = where === "path" && name === "model_id" ? model : "";
    fields[where][name] = field(inputs, name, schema, description, { value, ...(where === "path" ? { required: "" } : {}) });
  }
  for (const [name, schema] of Object.entries(form?.schema.properties ?? {})) {
    fields.form[name] = field(inputs, name, schema, schema.description, { required: "" });
  }
  const text = element("textarea", { class: "code", rows: String(JSON.stringify(body, null, 2)?.split("\n").length + 1), spellcheck: "false", "aria-label": "Body, as JSON" });
  text.value = body ? JSON.stringify(body, null, 2) : "";
  const stream = element("input", { type: "checkbox", ...(streams ? { checked: "" } : {}) });
  const send = element("button", { type: "submit", class: "primary" }, "Send");
  const problem = element("p", { class: "error", role: "alert" });
  const result = element("div", { class: "result" });
  let sending = null;

  async function run() {
    const options = { method: method.toUpperCase(), headers: {} };
    const query = new URLSearchParams(Object.entries(fields.query).flatMap(([name, { value }]) => (value ? [[name, value]] : [])));
    const url = new URL(filled(path.slice(1), (name) => fields.path[name].value) + (query.size ? `?${query}` : ""), ROOT);
    if (form) {
      options.body = new FormData();
      for (const [name, input] of Object.entries(fields.form)) options.body.append(name, input.files?.[0] ?? input.value);
    } else if (body) {
      const parsed = JSON.parse(text.value);
      options.body = JSON.stringify(streams ? { ...parsed, stream: stream.checked } : parsed);
      options.headers["content-type"] = "application/json";
    }
    sending = new AbortController();
    await show(result, url, options, sending.signal);
  }

  const shown = element(
    "form",
    { class: "try", "aria-label": `Try ${method.toUpperCase()} ${path}` },
    inputs,
    ...(body ? [text] : []),
    element("div", { class: "row" }, send, ...(streams ? [element("label", {}, stream, " Stream")] : [])),
    problem,
    result,
  );
  shown.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (sending) return sending.abort();
    problem.textContent = "";
    text.removeAttribute("aria-invalid");
    send.textContent = "Stop";
    try {
      await run();
    } catch (error) {
      if (error instanceof SyntaxError) text.setAttribute("aria-invalid", "true");
      if (error.name !== "AbortError") problem.textContent = error instanceof SyntaxError ? `The body is not JSON: ${error.message}` : error.message;
    }
    send.textContent = "Send";
    sending = null;
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) shown.requestSubmit();
  });
  return shown;
}

function field(inputs, name, schema, description, attributes) {
  const choices = resolved(schema).enum;
  const kind = schema.format === "binary" ? { type: "file" } : schema.type === "integer" ? { type: "number" } : { type: "text" };
  const input = choices
    ? element("select", {}, ...("required" in attributes ? [] : [element("option", { value: "" }, "–")]), ...choices.map((one) => element("option", {}, one)))
    : element("input", { ...kind, ...attributes, placeholder: typeOf(schema), autocomplete: "off" });
  inputs.append(element("label", { title: description }, name, " ", input));
  return input;
}

// Sends the request, and shows its status, its headers and its answer. Throws what `reach` throws.
async function show(result, url, options, signal) {
  const began = performance.now();
  const status = element("p", { role: "status" }, "Waiting for the answer…");
  const output = element("pre", { tabindex: "0", "aria-label": "Answer" });
  const text = element("pre", { class: "text", tabindex: "0", "aria-label": "Text of the answer", hidden: "" });
  result.replaceChildren(status);
  const response = await reach(url, { ...options, signal });
  const isJson = response.headers.get("content-type")?.startsWith("application/json");
  const isStream = response.headers.get("content-type")?.startsWith("text/event-stream");
  const say = (end) => {
    status.textContent = `${response.status} ${response.statusText} · ${end} ${duration((performance.now() - began) / 1000)}`;
  };
  say("headers after");
  status.className = response.ok ? "outcome-finished" : "outcome-failed";
  const requestId = response.headers.get("x-request-id");
  const showsRequests = document.querySelector("[data-shows-requests]:not([hidden])") !== null;
  if (requestId && showsRequests) result.append(element("p", {}, element("a", { href: pageOf(requestId) }, "Where its time went")));
  const fields = [...response.headers];
  const whole = isStream ? folded("Events", () => [output]) : output;
  result.append(text, folded(`Headers (${fields.length})`, () => [facts(fields)]), whole);
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let json = "";
  let length = 0;
  let line = "";
  try {
    for (let part = reader && (await readNext(reader)); part && !part.done; part = await readNext(reader)) {
      length += part.value.length;
      if (isJson) json += part.value;
      else output.append(part.value.slice(0, Math.max(0, MOST_CHARACTERS - (length - part.value.length)))); // a stream may never end
      if (!isStream || length > MOST_CHARACTERS) continue;
      const lines = (line + part.value).split("\n");
      line = lines.pop();
      for (const data of lines.filter((one) => one.startsWith("data: {"))) write(text, textOf(JSON.parse(data.slice(6))));
    }
    if (isJson && response.ok) write(text, textOf(JSON.parse(json)));
    say("ended after");
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    say("stopped after");
  }
  if (isJson) output.textContent = indented(json).slice(0, MOST_CHARACTERS);
  if (isStream) whole.open = text.hidden;
  if (length > MOST_CHARACTERS) output.append(`\n… and ${count(length - MOST_CHARACTERS)} more characters`);
  output.hidden = !length;
}

// Returns the text of the first choice in an answer or in an event of a stream, as far as it has one.
function textOf(data) {
  const [choice] = data.choices ?? [];
  const found = choice?.delta?.content ?? choice?.message?.content ?? choice?.text ?? data.delta?.text;
  if (typeof found === "string") return choice?.index ? "" : found;
  if (data.type === "response.output_text.delta") return data.delta;
  const parts = data.content ?? (data.output ?? []).flatMap((item) => item.content ?? []); // of a message or a response
  return Array.isArray(parts) ? parts.map((part) => part.text ?? "").join("") : "";
}

function write(element, text) {
  if (!text) return;
  element.append(text);
  element.hidden = false;
}
