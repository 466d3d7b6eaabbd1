// What is sent to a route: snippets for several languages, and a form that sends it from the page.

import { folded, resolved, typeOf } from "./api_schema.js";
import { duration, element, indented } from "./show.js";
import { key, ROOT } from "./sse.js";

export const ADDRESS = ROOT.href.replace(/\/$/, "");
const MOST_CHARACTERS = 200_000; // of an answer that is shown
const MOST_INLINE = 80; // characters of a value in one line

// What OpenAI's SDKs call a route. Python and JavaScript have the same names, but for their case.
const OPENAI = {
  "post /v1/chat/completions": "chat.completions.create",
  "post /v1/completions": "completions.create",
  "post /v1/responses": "responses.create",
  "post /v1/responses/compact": "responses.compact",
  "post /v1/responses/input_tokens": "responses.input_tokens.count",
  "get /v1/responses/{response_id}": "responses.retrieve",
  "delete /v1/responses/{response_id}": "responses.delete",
  "get /v1/responses/{response_id}/input_items": "responses.input_items.list",
  "post /v1/responses/{response_id}/cancel": "responses.cancel",
  "post /v1/conversations": "conversations.create",
  "get /v1/conversations/{conversation_id}": "conversations.retrieve",
  "post /v1/conversations/{conversation_id}": "conversations.update",
  "delete /v1/conversations/{conversation_id}": "conversations.delete",
  "get /v1/conversations/{conversation_id}/items": "conversations.items.list",
  "post /v1/conversations/{conversation_id}/items": "conversations.items.create",
  "get /v1/conversations/{conversation_id}/items/{item_id}": "conversations.items.retrieve",
  "delete /v1/conversations/{conversation_id}/items/{item_id}": "conversations.items.delete",
  "post /v1/embeddings": "embeddings.create",
  "post /v1/batches": "batches.create",
  "get /v1/batches": "batches.list",
  "get /v1/batches/{batch_id}": "batches.retrieve",
  "post /v1/batches/{batch_id}/cancel": "batches.cancel",
  "post /v1/files": "files.create",
  "get /v1/files": "files.list",
  "get /v1/files/{file_id}": "files.retrieve",
  "delete /v1/files/{file_id}": "files.delete",
  "get /v1/files/{file_id}/content": "files.content",
  "get /v1/models": "models.list",
  "get /v1/models/{model_id}": "models.retrieve",
};
const ANTHROPIC = {
  "post /v1/messages": "messages.create",
  "post /v1/messages/count_tokens": "messages.count_tokens",
};
// The part of an answer that a snippet prints, if not all of it.
const PRINTED = {
  "chat.completions.create": ".choices[0].message.content",
  "completions.create": ".choices[0].text",
  "responses.create": ".output_text",
  "embeddings.create": ".data[0].embedding",
  "messages.create": ".content[0].text",
  "files.content": ".text",
};

export const media = (route, type) => route.operation.requestBody?.content[type];

// Returns the example of a route's body for the model, or undefined if it has none.
export function exampleBody(route, model) {
  const json = media(route, "application/json");
  if (!json) return undefined;
  const hasModel = "model" in (resolved(json.schema).properties ?? {});
  return { ...(hasModel ? { model } : {}), ...json.example, ...(hasModel ? { model } : {}) };
}

const pathNames = (path) => [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
const placeholder = (name, model) => (name === "model_id" ? model : name.toUpperCase());
const filled = (path, valueOf) => path.replaceAll(/\{(\w+)\}/g, (_, name) => encodeURIComponent(valueOf(name)).replaceAll("%2F", "/"));

// Returns the snippets of a route by their language. Each is a function that writes it with a key.
export function snippets(route, model) {
  const call = `${route.method} ${route.path}`;
  const found = { curl: (key) => curl(route, model, key) };
  for (const [provider, names] of Object.entries({ OpenAI: OPENAI, Anthropic: ANTHROPIC })) {
    if (!names[call]) continue;
    found[`Python (${provider})`] = (key) => python(route, model, key, provider, names[call]);
    found[`JavaScript (${provider})`] = (key) => javascript(route, model, key, provider, names[call]);
  }
  return found;
}

export const maskedKey = () => (key() ? "••••••••" : null);

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(route, model, key) {
  const { method, path } = route;
  const body = exampleBody(route, model);
  const form = media(route, "multipart/form-data");
  const url = ADDRESS + filled(path, (name) => placeholder(name, model));
  const parts = [`curl ${/^[\w:/.-]+$/.test(url) ? url : quoted(url)}`];
  if (method === "delete" || (method === "post" && !body && !form)) parts[0] += ` -X ${method.toUpperCase()}`;
  if (key) parts.push(`-H ${quoted(`authorization: Bearer ${key}`)}`);
  if (form) parts.push("-F file=@in.jsonl -F purpose=batch");
  if (body) parts.push("-H 'content-type: application/json'", `-d ${quoted(literal(body, "json"))}`);
  return parts.join(" \\\n  ");
}

// Returns a value as a literal of a language: short ones in a line, others with a line for each member.
function literal(value, language, indent = "") {
  const constants = { null: "None", true: "True", false: "False" };
  if (value === null || typeof value !== "object") {
    const text = JSON.stringify(value);
    return language === "python" ? (constants[text] ?? text) : text;
  }
  const isList = Array.isArray(value);
  const named = (name) => (language === "javascript" && /^\w+$/.test(name) ? name : JSON.stringify(name));
  const write = (inner) =>
    Object.entries(value).map(([name, one]) => (isList ? "" : `${named(name)}: `) + literal(one, language, inner));
  const [open, close] = isList ? "[]" : language === "javascript" ? ["{ ", " }"] : "{}";
  const line = open + write(indent).join(", ") + close;
  if (line.length <= MOST_INLINE && !line.includes("\n")) return line;
  const inner = `${indent}  `;
  return `${open.trim()}\n${inner}${write(inner).join(`,\n${inner}`)}\n${indent}${close.trim()}`;
}

function python(route, model, key, provider, call) {
  const names = pathNames(route.path);
  const last = names.pop();
  const values = Object.entries(exampleBody(route, model) ?? {});
  if (call === "files.create") values.push(["file", null], ["purpose", "batch"]);
  const args = [
    ...(last ? [JSON.stringify(placeholder(last, model))] : []),
    ...names.map((name) => `${name}="${placeholder(name, model)}"`),
    ...values.map(([name, value]) => `${name}=${name === "file" ? 'Path("in.jsonl")' : literal(value, "python", "    ")}`),
  ];
  const isShort = args.join(", ").length <= MOST_INLINE;
  return [
    ...(call === "files.create" ? ["from pathlib import Path", ""] : []),
    `from ${provider.toLowerCase()} import ${provider}`,
    "",
    `client = ${provider}(base_url="${base(provider)}", api_key="${key ?? "none"}")`,
    `answer = client.${call}(${isShort ? args.join(", ") : `\n    ${args.join(",\n    ")},\n`})`,
    `print(answer${PRINTED[call] ?? ""})`,
  ].join("\n");
}

function javascript(route, model, key, provider, call) {
  const names = pathNames(route.path);
  const last = names.pop();
  const body = { ...Object.fromEntries(names.map((name) => [name, placeholder(name, model)])), ...exampleBody(route, model) };
  const args = last ? [JSON.stringify(placeholder(last, model))] : [];
  if (call === "files.create") args.push('{ file: fs.createReadStream("in.jsonl"), purpose: "batch" }');
  else if (Object.keys(body).length) args.push(literal(body, "javascript"));
  const camel = call.replaceAll(/[_](\w)/g, (_, letter) => letter.toUpperCase());
  const printed = call === "files.content" ? "await answer.text()" : `answer${PRINTED[call] ?? ""}`;
  return [
    ...(call === "files.create" ? ['import fs from "node:fs";'] : []),
    `import ${provider} from "${provider === "OpenAI" ? "openai" : "@anthropic-ai/sdk"}";`,
    "",
    `const client = new ${provider}({ baseURL: "${base(provider)}", apiKey: "${key ?? "none"}" });`,
    `const answer = await client.${camel}(${args.join(", ")});`,
    `console.log(${printed});`,
  ].join("\n");
}

const base = (provider) => (provider === "OpenAI" ? `${ADDRESS}/v1` : ADDRESS);

// Returns a form that sends a request to the route, and shows what comes as it comes.
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
    await show(result, url, options, (sending = new AbortController()).signal);
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

// Sends the request, and shows its status, its headers and its answer. Raises what fetch raises.
async function show(result, url, options, signal) {
  const began = performance.now();
  const status = element("p", { role: "status" }, "Waiting for the answer …");
  const output = element("pre", { tabindex: "0", "aria-label": "Answer" });
  result.replaceChildren(status);
  const headers = { ...options.headers, ...(key() ? { authorization: `Bearer ${key()}` } : {}) };
  const response = await fetch(url, { ...options, headers, signal });
  const isJson = response.headers.get("content-type")?.startsWith("application/json");
  const say = (end) => {
    status.textContent = `${response.status} ${response.statusText} · ${end} ${duration((performance.now() - began) / 1000)}`;
  };
  say("headers after");
  status.className = response.ok ? "outcome-finished" : "outcome-failed";
  const requestId = response.headers.get("x-request-id");
  const showsRequests = document.querySelector("[data-shows-requests]:not([hidden])") !== null;
  if (requestId && showsRequests) result.append(element("p", {}, element("a", { href: new URL(`requests/${encodeURIComponent(requestId)}`, ROOT) }, "Where its time went")));
  const rows = [...response.headers].flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  result.append(folded(`Headers (${rows.length / 2})`, () => [element("dl", { class: "facts" }, ...rows)]), output);
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
      text += part.value;
      if (!isJson && text.length <= MOST_CHARACTERS) output.append(part.value);
    }
    say("ended after");
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    say("stopped after");
  }
  if (isJson) output.textContent = indented(text).slice(0, MOST_CHARACTERS);
  if (text.length > MOST_CHARACTERS) output.append(`\n… and ${text.length - MOST_CHARACTERS} characters more`);
  output.hidden = !text;
}
