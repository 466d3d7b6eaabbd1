// Writes snippets that send a request to a route, in several languages.

import { resolved } from "./api_schema.js";
import { key, ROOT } from "./sse.js";

export const ADDRESS = ROOT.href.replace(/\/$/, "");
const MOST_INLINE = 80; // characters of a value in one line

// The paths that a provider's SDKs have. The answers of an unfinished batch are a route of oaiserve alone.
const PROVIDERS = { OpenAI: /^\/v1\/(chat|completions|responses|conversations|embeddings|batches(?!\/.*\/answers$)|files|models)\b/, Anthropic: /^\/v1\/messages\b/ };
const ACTIONS = ["cancel", "compact", "content", "count_tokens", "results"]; // at the end of a path, these are methods

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
export const filled = (path, valueOf) => path.replaceAll(/\{(\w+)\}/g, (_, name) => encodeURIComponent(valueOf(name)).replaceAll("%2F", "/"));

// Returns what the provider's SDKs call a route. Python and JavaScript have the same names, except for their case.
function callOf({ method, path }) {
  const parts = path.split("/").slice(2);
  const names = parts.filter((part) => !part.startsWith("{"));
  const last = parts.at(-1);
  const ofOne = { get: "retrieve", post: "update", delete: "delete" };
  if (last.startsWith("{")) names.push(ofOne[method]);
  else if (last === "input_tokens") names.push("count");
  else if (!ACTIONS.includes(last)) names.push(method === "get" ? "list" : "create");
  return names.join(".");
}

// Returns the snippets of a route by their language. Each is a function that writes it with a key.
export function snippets(route, model) {
  const found = { curl: (key) => curl(route, model, key) };
  for (const [provider, paths] of Object.entries(PROVIDERS)) {
    if (!paths.test(route.path)) continue;
    const call = callOf(route);
    found[`Python (${provider})`] = (key) => python(route, model, key, provider, call);
    found[`JavaScript (${provider})`] = (key) => javascript(route, model, key, provider, call);
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
    `client = ${provider}(base_url="${base(provider)}", api_key=${JSON.stringify(key ?? "none")})`,
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
    `const client = new ${provider}({ baseURL: "${base(provider)}", apiKey: ${JSON.stringify(key ?? "none")} });`,
    `const answer = await client.${camel}(${args.join(", ")});`,
    `console.log(${printed});`,
  ].join("\n");
}

const base = (provider) => (provider === "OpenAI" ? `${ADDRESS}/v1` : ADDRESS);
