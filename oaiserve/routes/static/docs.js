// Shows the server's own schema: each route with what it takes, what it answers, and a call with curl.

import { byId, element, showProblem } from "./show.js";
import { hasKey, keepKey, Refused, request, ROOT } from "./sse.js";

let schemas = {};

const nameOf = (reference) => reference.split("/").pop();

// Returns a schema without its reference, and the name that it has by that.
function resolved(schema) {
  return schema.$ref ? { name: nameOf(schema.$ref), ...schemas[nameOf(schema.$ref)] } : schema;
}

// Returns the type of a value in words, such as "list of Message, or null".
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(", or ");
  if (Array.isArray(schema.type)) return schema.type.join(", or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  if (schema.additionalProperties) return `object of ${typeOf(schema.additionalProperties)}`;
  if (schema.enum && !schema.type) return "one of";
  return schema.type ?? "anything";
}

// Returns what a value must keep to, in words: its type, and its limits if it has any.
function typeAndLimits(schema) {
  const limits = [];
  const range = (low, high, what) => {
    const text = [low, high].map((bound) => bound?.toLocaleString("en", { maximumFractionDigits: 3 }));
    if (low !== undefined && high !== undefined) limits.push(`${text[0]} to ${text[1]}${what}`);
    else if (low !== undefined) limits.push(`at least ${text[0]}${what}`);
    else if (high !== undefined) limits.push(`at most ${text[1]}${what}`);
  };
  if (schema.enum) limits.push(schema.enum.map((value) => JSON.stringify(value)).join(", "));
  range(schema.minimum, schema.maximum, "");
  range(schema.minLength, schema.maxLength, " characters");
  range(schema.minItems, schema.maxItems, " items");
  return typeOf(schema) + (limits.length ? `: ${limits.join("; ")}` : "");
}

// Returns the schemas with fields that are within a type: one, or several in a union.
function objectsIn(schema) {
  if (schema.$ref) return [resolved(schema)];
  const inner = [...(schema.anyOf ?? []), schema.items, schema.additionalProperties];
  return inner.filter((part) => part && typeof part === "object").flatMap(objectsIn);
}

// Makes the list of the fields of an object. Objects within it can be unfolded, unless they are around it already.
function fieldList(schema, around = []) {
  const list = element("dl", { class: "fields" });
  const required = new Set(schema.required);
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const about = element("p", { class: "type" }, typeAndLimits(field));
    if (required.has(name)) about.append(" ", element("b", {}, "required"));
    const shown = element("dd", {}, about);
    if (field.description) shown.append(element("p", {}, field.description));
    for (const inner of objectsIn(field)) {
      if (!around.includes(inner.name)) shown.append(folded(inner, [...around, inner.name]));
    }
    list.append(element("dt", {}, name), shown);
  }
  return list;
}

// Makes an object that can be unfolded. Its fields are made when it is unfolded for the first time.
function folded(schema, around) {
  const made = element("details", {}, element("summary", {}, schema.name ?? "Fields"));
  made.addEventListener("toggle", () => {
    if (made.children.length > 1) return;
    if (schema.description) made.append(element("p", { class: "note" }, schema.description));
    made.append(fieldList(schema, around));
  });
  return made;
}

function queryList(parameters) {
  const list = element("dl", { class: "fields" });
  for (const { name, description, schema, in: place } of parameters) {
    const about = element("p", { class: "type" }, `${typeAndLimits(schema)}, in the ${place}`);
    list.append(element("dt", {}, name), element("dd", {}, about, description ? element("p", {}, description) : ""));
  }
  return list;
}

// Returns a call of the route with curl, as one would write it in a shell.
function curl(path, method, operation, example) {
  const address = new URL(path.slice(1).replace(/[{}]/g, ""), ROOT);
  const parts = [`curl ${address}`];
  if (method === "post" && !example) parts.push("-X POST");
  if (operation.security.every((choice) => choice.api_key)) parts.push('-H "authorization: Bearer $API_KEY"');
  if (example) parts.push("-H 'content-type: application/json'", `-d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`);
  return parts.join(" \\\n  ");
}

function section(path, method, operation, responses) {
  const body = operation.requestBody?.content["application/json"];
  const answers = operation.responses["200"].content ?? {};
  const badge = element("span", { class: `method ${method}` }, method.toUpperCase());
  const made = element("section", { id: operation.operationId }, element("h2", {}, badge, path));
  made.append(element("p", {}, operation.summary));
  made.append(element("pre", { tabindex: "0" }, curl(path, method, operation, body?.example)));
  if (operation.parameters) made.append(element("h3", {}, "Parameters"), queryList(operation.parameters));
  if (body) made.append(element("h3", {}, "Body"), folded(resolved(body.schema), [nameOf(body.schema.$ref)]));
  made.append(element("h3", {}, "Answer"));
  for (const [media, { schema }] of Object.entries(answers)) {
    made.append(element("p", { class: "type" }, media === "*/*" ? "the file" : media));
    const event = schema?.properties?.data; // of a stream
    if (event) made.append(element("p", {}, `The data of each event: ${event.description.replaceAll("`", "")}`));
    const reference = (event?.anyOf[0].contentSchema ?? schema)?.$ref;
    if (reference) made.append(folded(resolved({ $ref: reference }), [nameOf(reference)]));
  }
  if (!Object.keys(answers).length) made.append(element("p", { class: "type" }, "no content"));
  const errors = element("details", {}, element("summary", {}, "Errors"));
  const list = element("dl", { class: "fields" });
  for (const status of Object.keys(operation.responses).filter((status) => status !== "200")) {
    list.append(element("dt", {}, status), element("dd", {}, responses[status].description.replaceAll("`", "")));
  }
  errors.append(list, folded(resolved({ $ref: "ErrorAnswer" }), ["ErrorAnswer"]));
  made.append(errors);
  return made;
}

function show(published) {
  schemas = published.components.schemas;
  byId("version").textContent = published.info.version;
  byId("live-link").hidden = !Object.keys(published.paths).some((path) => path.endsWith("dashboard"));
  const groups = new Map();
  for (const [path, methods] of Object.entries(published.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const group = operation.tags[0];
      groups.set(group, [...(groups.get(group) ?? []), { path, method, operation }]);
    }
  }
  for (const [group, routes] of groups) {
    byId("routes").append(element("h2", {}, group));
    for (const { path, method, operation } of routes) {
      const badge = element("span", { class: `method ${method}` }, method.toUpperCase());
      byId("routes").append(element("a", { href: `#${operation.operationId}` }, badge, path));
      byId("main").append(section(path, method, operation, published.components.responses));
    }
  }
  byId("key-form").hidden = true;
  byId("reference").hidden = false;
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

async function load() {
  try {
    const response = await request("openapi.json");
    showProblem("");
    show(await response.json());
  } catch (error) {
    if (error.needsKey) {
      showProblem(hasKey() ? `${error.message} Please enter another one.` : "");
      byId("key-form").hidden = false;
      byId("key").focus();
    } else {
      showProblem(error instanceof Refused ? error.message : "The server does not answer.");
    }
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value.trim());
  byId("key").value = "";
  load();
});
load();
