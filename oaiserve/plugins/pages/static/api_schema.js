// Describes the schemas of bodies and answers: types and limits in words, lists of fields, and names for the search.

import { element } from "./show.js";

const LARGEST = 2 ** 31 - 1; // larger limits are those of the number's type, and are not shown
const DEFAULT = / ?Default: ((?:[^.]|\.(?=\d))+)\.(?= |$)/;
const DEEPEST = 3; // levels of fields in the search
let components = {};

export function readComponents(document) {
  components = document.components;
}

// Returns the target of a reference, or the schema itself.
export function resolved(schema = {}) {
  const { $ref: reference, ...others } = schema;
  if (!reference) return schema;
  const [kind, name] = reference.split("/").slice(2);
  return { ...components[kind][name], ...others };
}

// Returns the alternatives of a schema, without unions.
function options(schema) {
  const one = resolved(schema);
  return one.anyOf ? one.anyOf.flatMap(options) : [one];
}

export function typeOf(schema) {
  const names = options(schema).flatMap((one) => {
    if ("const" in one) return [JSON.stringify(one.const)];
    if (one.enum) return one.enum.filter((value) => value !== null).map((value) => JSON.stringify(value));
    if (one.format === "binary") return ["file"];
    const types = [one.type ?? "any value"].flat().filter((type) => type !== "null");
    return types.map((type) => (type === "array" ? `list of ${typeOf(one.items ?? {})}` : type));
  });
  return [...new Set(names)].join(" or ");
}

function range(least, most, unit = "") {
  const from = Math.abs(least) < LARGEST ? least : undefined;
  const to = Math.abs(most) < LARGEST ? most : undefined;
  if (from === undefined) return to === undefined ? [] : [`at most ${to}${unit}`];
  return [to === undefined ? `at least ${from}${unit}` : `${from} to ${to}${unit}`];
}

function limits(schema) {
  const found = [schema, ...options(schema)].flatMap((one) => [
    ...range(one.minimum, one.maximum),
    ...range(one.minLength, one.maxLength, " characters"),
    ...range(one.minItems, one.maxItems, " items"),
  ]);
  return [...new Set(found)];
}

// Returns the objects in a schema that have fields.
function objects(schema) {
  return options(schema).flatMap((one) => {
    if (one.properties) return [one];
    if (one.items) return objects(one.items);
    return typeof one.additionalProperties === "object" ? objects(one.additionalProperties) : [];
  });
}

// Returns the names of fields, also of those within fields, each with its path, as in response_format.type.
export function fieldNames(schema, before = "", depth = 1) {
  return objects(schema).flatMap(({ properties }) =>
    Object.entries(properties).flatMap(([name, field]) => {
      const path = before + name;
      return depth < DEEPEST ? [path, ...fieldNames(field, `${path}.`, depth + 1)] : [path];
    }),
  );
}

// Returns text in which the parts in backquotes are code elements.
export function prose(text) {
  return text.split("`").map((part, position) => (position % 2 ? element("code", {}, part) : part));
}

// Returns the lists of fields of a schema. Nested lists are made when they are opened. The ids begin with `id`.
export function fieldLists(schema, id) {
  return objects(schema).flatMap(({ title, properties, required = [] }, position, all) => {
    const rows = Object.entries(properties).map(([name, field]) => row(name, field, required.includes(name), position ? "" : id));
    const list = element("ul", { class: "fields" }, ...rows);
    return all.length > 1 ? [element("p", { class: "note" }, title ?? "Object"), list] : [list];
  });
}

function row(name, field, isRequired, id) {
  const one = resolved(field);
  const given = one.description?.match(DEFAULT)?.[1];
  const known = one.default === undefined || one.default === null ? given : JSON.stringify(one.default);
  const notes = [typeOf(field), ...limits(field), ...(known ? [`default ${known}`] : [])];
  const described = (one.description ?? "").replace(DEFAULT, "").trim();
  const label = id ? element("a", { href: `#${id}.${name}` }, name) : name;
  const made = element(
    "li",
    id ? { id: `${id}.${name}` } : {},
    element("code", { class: "name" }, label),
    " ",
    element("span", { class: "type" }, notes.join(" · ")),
    ...(isRequired ? [" ", element("span", { class: "required" }, "required")] : []),
    ...(described ? [element("p", {}, ...prose(described))] : []),
  );
  if (objects(field).length) made.append(folded(`Fields of ${name}`, () => fieldLists(field, id && `${id}.${name}`)));
  return made;
}

// Returns a folded part. Its content is made when it is first opened.
export function folded(title, content) {
  const part = element("details", {}, element("summary", {}, ...[title].flat()));
  part.fill = () => part.children.length === 1 && part.append(...content());
  part.addEventListener("toggle", () => part.open && part.fill());
  return part;
}
