// Runs the API page: it lists the routes in the server's openapi.json by group, with a search over routes and fields.
// The content of a route is made when it is first opened.

import { fieldLists, fieldNames, folded, prose, readComponents, resolved } from "./api_schema.js";
import { ADDRESS, maskedKey, media, snippets } from "./api_snippets.js";
import { tryForm } from "./api_try.js";
import { copyOnClick } from "./copy.js";
import { showMain, start } from "./page.js";
import { byId, choice, element, RETRY_MS, setStatus, showLost, showProblem } from "./show.js";
import { key, Refused, requestJson } from "./sse.js";
import { local } from "./storage.js";

const LANGUAGE = "oaiserve-snippets"; // stores the last choice
const BODIES = ["application/json", "multipart/form-data"];
const MOST_MATCHES = 8; // fields per route in the search
let routes = [];
let model = "MODEL";

async function load() {
  try {
    const schema = await requestJson("openapi.json");
    const models = await requestJson("v1/models").catch(() => ({ data: [] }));
    readComponents(schema);
    showMain();
    showProblem("");
    setStatus("live", "Connected");
    showServer(models.data.map(({ id }) => id));
    const all = Object.entries(schema.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => ({ path, method, operation, id: operation.operationId })),
    );
    const groups = schema.tags.map(({ name }) => all.filter(({ operation }) => operation.tags[0] === name));
    routes = groups.flat();
    showRoutes(groups.filter((group) => group.length));
    search();
    openLinked();
  } catch (error) {
    if (error.needsKey) return;
    showProblem(error.message);
    if (error instanceof Refused) return;
    showLost();
    setTimeout(load, RETRY_MS);
  }
}

function showServer(names) {
  model = names[0] ?? model;
  const choice = element("select", { id: "model" }, ...names.map((name) => element("option", {}, name)));
  choice.addEventListener("change", () => {
    model = choice.value;
    for (const { box } of routes) {
      box.replaceChildren(box.firstChild);
      if (box.open) box.fill();
    }
  });
  const named = names.length > 1 ? [element("label", { class: "unseen", for: "model" }, "Model"), choice] : [element("code", {}, model)];
  const secret = key() ? [element("code", {}, maskedKey()), copyButton("Copy the key", () => key())] : ["none needed"];
  byId("server").replaceChildren(
    element("dt", {}, "Base URL"),
    element("dd", {}, element("code", {}, `${ADDRESS}/v1`), copyButton("Copy the base URL", () => `${ADDRESS}/v1`)),
    element("dt", {}, "Model"),
    element("dd", {}, ...named, copyButton("Copy the model's name", () => model)),
    element("dt", {}, "API key"),
    element("dd", {}, ...secret),
  );
}

function showRoutes(groups) {
  const named = groups.map((found) => {
    const [group] = found[0].operation.tags;
    return { group, found, anchor: `group-${group.toLowerCase().replaceAll(" ", "-")}` };
  });
  byId("groups").replaceChildren(...named.map(({ group, anchor }) => element("li", {}, element("a", { href: `#${anchor}` }, group))));
  byId("routes").replaceChildren(
    ...named.map(({ group, found, anchor }) => element("section", { id: anchor }, element("h2", {}, group), ...found.map(routeBox))),
  );
}

function routeBox(route) {
  const { method, path, operation, id } = route;
  const inputs = BODIES.flatMap((type) => fieldNames(media(route, type)?.schema));
  route.fields = [...inputs, ...(operation.parameters ?? []).map(({ name }) => name)];
  route.text = `${method} ${path} ${operation.summary}`.toLowerCase();
  route.matches = element("p", { class: "matches note" });
  const title = element("h3", {}, element("span", { class: `method ${method}` }, method.toUpperCase()), " ", element("code", {}, path));
  route.box = folded([title, element("span", { class: "about" }, ...prose(operation.summary))], () => [content(route)]);
  route.box.id = id;
  route.box.className = "route";
  route.row = element("div", {}, route.box, route.matches);
  return route.row;
}

function content(route) {
  const { operation, id } = route;
  const parts = [];
  if (operation.tags[0] !== "Pages") parts.push(snippetBox(route), folded("Try it", () => [tryForm(route, model)]));
  const query = operation.parameters ?? [];
  if (query.length) {
    const properties = Object.fromEntries(query.map(({ name, schema, description }) => [name, { ...schema, description }]));
    const required = query.filter((one) => one.required).map(({ name }) => name);
    parts.push(element("h4", {}, "Parameters"), ...fieldLists({ properties, required }, id));
  }
  for (const type of BODIES) {
    const body = media(route, type);
    if (body) parts.push(element("h4", {}, `Body: ${type}`), ...fieldLists(body.schema, id));
  }
  parts.push(element("h4", {}, "Answers"), ...answers(operation));
  return element("div", { class: "content-of-route" }, ...parts);
}

function answers(operation) {
  const { 200: good, ...bad } = operation.responses;
  const kinds = Object.entries(good.content ?? {}).map(([type, { schema }]) => {
    const title = `200 ${type}`;
    return schema ? folded(title, () => (type === "text/event-stream" ? eventParts(schema) : fieldLists(schema, ""))) : element("p", {}, title);
  });
  const errors = () =>
    Object.entries(bad).map(([status, reference]) => element("p", {}, element("strong", {}, status), " ", ...prose(resolved(reference).description)));
  const error = () => fieldLists(resolved(Object.values(bad)[0]).content["application/json"].schema, "");
  return [...(kinds.length ? kinds : [element("p", {}, "200, without a body")]), folded(`Errors: ${Object.keys(bad).join(", ")}`, () => [...errors(), folded("Fields of an error", error)])];
}

function eventParts(schema) {
  const [{ contentSchema: event }] = schema.properties.data.anyOf;
  const note = "Server-sent events. The data of each event is JSON with these fields, or an error; the last event is [DONE].";
  return [element("p", { class: "note" }, note), ...fieldLists(event, "")];
}

function snippetBox(route) {
  const written = snippets(route, model);
  const languages = Object.keys(written);
  const code = element("pre", { tabindex: "0", "aria-label": "Snippet" });
  let chosen = "";
  const write = (language) => {
    chosen = language;
    code.textContent = written[language](maskedKey());
  };
  const remember = (language) => {
    write(language);
    local.setItem(LANGUAGE, language.split(" ")[0]);
  };
  write(languages.find((language) => language.split(" ")[0] === local.getItem(LANGUAGE)) ?? languages[0]);
  const links = element("span", {}, element("a", { class: "note", href: `#${route.id}` }, "Link"), copyButton("Copy this snippet", () => written[chosen](key())));
  const tabs = choice("Language of the snippet", languages.map((language) => [language, language]), chosen, remember);
  return element("div", { class: "snippet" }, element("div", { class: "title-row" }, tabs, links), code);
}

function copyButton(label, text) {
  const button = element("button", { type: "button", class: "plain copy", "aria-label": label }, "Copy");
  copyOnClick(button, text, (result) => (button.textContent = result ?? "Copy"));
  return button;
}

// Shows the routes that have all words of the search in their path, their summary or the name of one field.
function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const route of routes) {
    const found = words.map((word) => route.fields.filter((name) => name.toLowerCase().includes(word)));
    const isShown = words.every((word, position) => route.text.includes(word) || found[position].length > 0);
    const named = words.length ? [...new Set(found.flat())] : [];
    route.row.hidden = !isShown;
    if (words.length) route.box.open = false; // so that the matches of all routes are in sight
    route.matches.hidden = !isShown || !named.length;
    route.matches.replaceChildren(...named.slice(0, MOST_MATCHES).flatMap((name) => [element("a", { href: `#${route.id}.${name}` }, name), " "]));
    if (named.length > MOST_MATCHES) route.matches.append(`and ${named.length - MOST_MATCHES} more`);
    count += isShown;
  }
  for (const part of byId("routes").children) part.hidden = !part.querySelector("div:not([hidden]) > .route");
  byId("found").textContent = words.length ? `${count} of ${routes.length} routes` : `${routes.length} routes`;
}

// Opens the route, and the fields around the field, that the address names; the first route if it names none.
function openLinked() {
  const name = decodeURIComponent(location.hash.slice(1));
  const [id, ...path] = name.split(".");
  const route = routes.find((one) => one.id === id);
  if (!route) {
    if (name) byId(name)?.scrollIntoView();
    else if (routes.length) routes[0].box.open = true;
    return;
  }
  route.box.fill();
  route.box.open = true;
  let target = route.box;
  path.forEach((field, depth) => {
    const inside = depth ? target.querySelector(":scope > details") : null;
    inside?.fill();
    if (inside) inside.open = true;
    target = byId(`${id}.${path.slice(0, depth + 1).join(".")}`) ?? target;
  });
  target.scrollIntoView();
  target.classList.add("linked");
}

byId("search").addEventListener("input", search);
window.addEventListener("hashchange", openLinked);
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "/" && !isTyping) {
    event.preventDefault();
    byId("search").focus();
  }
  if (event.key === "Escape" && event.target === byId("search")) {
    byId("search").value = "";
    search();
  }
});

start(load);
