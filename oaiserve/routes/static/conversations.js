// Keeps conversations in the browser: one item of its storage for each.

const PREFIX = "oaiserve-chat-";

// A conversation has the `settings` of its form and `turns`; a turn has `text`, `files` (with a `text`, or the
// `url` of a picture) and `answers`; an answer has a
// `model` and `steps`, more than one where results of tools were sent; and a step is what `ask` makes.
export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", changedMs: Date.now(), turns: [] };
}

// Returns all conversations, the one that was changed last first. What cannot be read is left out.
export function conversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.flatMap(read).sort((a, b) => b.changedMs - a.changedMs);
}

function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    for (const step of found.turns.flatMap(({ answers }) => answers).flatMap(({ steps }) => steps)) {
      if (step.isOpen) Object.assign(step, { isOpen: false, isStopped: true }); // the page was closed meanwhile
    }
    return [found];
  } catch (error) {
    console.warn(`${key} cannot be read: ${error.message}`);
    return [];
  }
}

// Keeps it as it is now, and returns whether it is whole: pictures are left out where the browser has no room for them.
// Throws QuotaExceededError if it has none for the rest either.
export function keep(conversation) {
  const key = PREFIX + conversation.id;
  try {
    localStorage.setItem(key, JSON.stringify(conversation));
    return true;
  } catch (error) {
    if (!conversation.turns.some(({ files }) => files.some(({ url }) => url))) throw error;
    localStorage.setItem(key, JSON.stringify(conversation, (name, value) => (name === "url" ? undefined : value)));
    return false;
  }
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

// Returns the messages up to `answer`, of the last turn, with its own steps so far. Of earlier turns it has what its
// model said there last, or else another one. Calls that nobody has answered are left out.
export function messages({ settings, turns }, answer) {
  const found = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) {
    const { model } = answer;
    const before = turn.answers.findLast((other) => other.model === model) ?? turn.answers.at(-1);
    found.push({ role: "user", content: content(turn) });
    for (const step of (turn.answers.includes(answer) ? answer : before)?.steps ?? []) found.push(...said(step));
  }
  return found;
}

function said({ message: { content, reasoning, calls }, results }) {
  const answered = calls.filter((call) => results?.[call.id] !== undefined);
  if (!content && !answered.length) return [];
  const own = { role: "assistant", content };
  if (reasoning) own.reasoning_content = reasoning;
  if (answered.length) own.tool_calls = answered.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  return [own, ...answered.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results[id] }))];
}

// Returns the text of a turn, with its files as blocks of code, behind its pictures.
function content({ text, files }) {
  const whole = [text, ...files.filter((file) => file.text !== undefined).map(fenced)].join("\n\n");
  const pictures = files.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return pictures.length ? [...pictures, { type: "text", text: whole }] : whole;
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `The file ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}
