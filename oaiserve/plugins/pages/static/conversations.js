// Stores conversations in the browser, one item of its storage for each, and finds the messages of a request in them.

import { local } from "./storage.js";

const PREFIX = "oaiserve-chat-";
const SHADES = ["tokens", "eventsMs"]; // of a step: most of its bytes
const TOKENS = '"tokens":[['; // in the JSON of a step that has any

// A conversation has the `settings` of its form and `turns`. A turn has `text`, `files` (each with a `text`, or the
// `url` of a picture), `answers`, and the `round` whose answers are shown. An answer has a `model`, its `round` and
// `steps`, more than one if tool results were sent; `ask` fills a step. A turn with other versions has `versions`: `at`
// is the number of this one, and `tails` has the turns from here on of each other version, and null for this one.
export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", changedMs: Date.now(), turns: [] };
}

// Returns all conversations, the last changed one first. Unreadable ones are left out.
export function conversations() {
  const keys = Object.keys(local).filter((key) => key.startsWith(PREFIX));
  return keys.flatMap(read).sort((a, b) => b.changedMs - a.changedMs);
}

export const keyOf = ({ id }) => PREFIX + id;

function read(key) {
  try {
    return [parsed(local.getItem(key))];
  } catch (error) {
    console.warn(`${key} cannot be read: ${error.message}`);
    return [];
  }
}

// Returns a conversation from its JSON. Throws an Error if it has another form.
function parsed(json) {
  const found = JSON.parse(json);
  for (const step of found.turns.flatMap(({ answers }) => answers).flatMap(({ steps }) => steps)) {
    // Another tab receives it, or a browser has been closed, which only a page that was left could note.
    if (step.isOpen) Object.assign(step, { isOpen: false, isCut: true, isElsewhere: !step.isLeft });
  }
  return found;
}

// Stores a conversation, and returns whether all of it fits: if not, its pictures are left out. Throws
// QuotaExceededError if the browser has no room for the rest either.
export function keep(conversation) {
  const key = keyOf(conversation);
  try {
    store(key, JSON.stringify(conversation));
    return true;
  } catch (error) {
    if (!conversation.turns.some(({ files }) => files.some(({ url }) => url))) throw error;
    store(key, JSON.stringify(conversation, (name, value) => (name === "url" ? undefined : value)));
    return false;
  }
}

// Stores a text. If the browser has no room, other conversations lose the tokens of their answers, which only shades
// and comparisons need, from the oldest on. Throws QuotaExceededError if that is not enough.
export function store(key, text) {
  let others = null;
  while (true) {
    try {
      return local.setItem(key, text);
    } catch (error) {
      others ??= conversations().filter((one) => keyOf(one) !== key && local.getItem(keyOf(one)).includes(TOKENS));
      if (!others.length) throw error;
      const oldest = others.pop();
      local.setItem(keyOf(oldest), JSON.stringify(oldest, (name, value) => (SHADES.includes(name) ? [] : value)));
    }
  }
}

export function forget(conversation) {
  local.removeItem(keyOf(conversation));
}

// Begins another version of the turn at a place: that turn and all after it are put aside.
export function addVersion({ turns }, place, turn) {
  const versions = turns[place].versions ?? { at: 0, tails: [null] };
  putAside(turns, place, versions);
  versions.at = versions.tails.push(null) - 1;
  turns.push({ ...turn, versions });
}

// Goes back to a version of the turn at a place.
export function chooseVersion({ turns }, place, number) {
  const { versions } = turns[place];
  putAside(turns, place, versions);
  turns.push(...versions.tails[number]);
  versions.tails[number] = null;
  versions.at = number;
  turns[place].versions = versions;
}

function putAside(turns, place, versions) {
  delete turns[place].versions; // only the shown turn has them
  versions.tails[versions.at] = turns.splice(place);
}

export function rounds({ answers }) {
  return [...new Set(answers.map(({ round }) => round))];
}

export function shownRound(turn) {
  return turn.round ?? rounds(turn).at(-1);
}

// Returns the answers of a turn that are shown.
export function shownAnswers(turn) {
  return turn.answers.filter(({ round }) => round === shownRound(turn));
}

// Returns the messages before `answer`, which is in the last turn, and its own steps so far. From earlier turns they
// include the shown answer of its model, or else of another one. Calls without a result are left out.
export function messages({ settings, turns }, answer) {
  const found = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) {
    const { model } = answer;
    const shown = shownAnswers(turn);
    const before = shown.findLast((other) => other.model === model) ?? shown.at(-1);
    found.push({ role: "user", content: content(turn) });
    for (const step of (turn.answers.includes(answer) ? answer : before)?.steps ?? []) found.push(...said(step));
  }
  return found;
}

// Returns a conversation as Markdown: its shown part, and all of it except for the shades in a comment at the end.
export function asMarkdown(conversation) {
  const { title, turns } = conversation;
  const whole = JSON.stringify(conversation, (name, value) => (SHADES.includes(name) ? [] : value)).replaceAll("-->", "--\\u003e");
  const parts = turns.flatMap((turn) => {
    const text = content(turn);
    const answers = shownAnswers(turn).map(({ model, steps }) => `## ${model}\n\n${steps.map(({ message }) => message.content).join("\n\n")}`);
    return [`## You\n\n${typeof text === "string" ? text : text.at(-1).text}`, ...answers];
  });
  return `${[`# ${title}`, ...parts, `<!-- oaiserve-chat ${whole} -->`].join("\n\n")}\n`;
}

// Returns a new conversation from the Markdown of an exported one. Throws an Error if there is none in it.
export function fromMarkdown(text) {
  const [, whole] = text.match(/\n<!-- oaiserve-chat (\{.*\}) -->\n*$/) ?? [];
  if (!whole) throw new Error("it is not a chat that this page has exported");
  const { id, changedMs } = newConversation();
  return { ...parsed(whole), id, changedMs };
}

function said({ message: { content, reasoning, calls }, results }) {
  const answered = calls.filter((call) => results?.[call.id] !== undefined);
  if (!content && !answered.length) return [];
  const own = { role: "assistant", content };
  if (reasoning) own.reasoning_content = reasoning;
  if (answered.length) own.tool_calls = answered.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  return [own, ...answered.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results[id] }))];
}

// Returns the pictures of a turn, followed by its text with its files as blocks of code.
function content({ text, files }) {
  const whole = [text, ...files.filter((file) => file.text !== undefined).map(fenced)].filter(Boolean).join("\n\n");
  const pictures = files.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return pictures.length ? [...pictures, { type: "text", text: whole }] : whole;
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `The file ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
