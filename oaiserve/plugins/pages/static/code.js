// Colours code by its language. The highlighter and each language are loaded when code needs them.

const FILES = ["bash", "cpp", "diff", "go", "java", "javascript", "json", "python", "rust", "sql", "xml", "yaml"];
const OTHER_NAMES = {
  ...{ c: "cpp", "c++": "cpp", cc: "cpp", h: "cpp", golang: "go", html: "xml", svg: "xml", js: "javascript" },
  ...{ jsx: "javascript", patch: "diff", py: "python", rs: "rust", sh: "bash", shell: "bash", console: "bash" },
  ...{ ts: "javascript", tsx: "javascript", typescript: "javascript", yml: "yaml", zsh: "bash" },
};
const MOST_CHARACTERS = 20_000; // of a block with colours: a growing one gets them again with each token
const loaded = new Map(); // by language: a promise, and then its highlighting function
let core = null;

async function load(language) {
  core ??= import("./highlight.js").then((module) => module.default);
  const [highlighter, grammar] = await Promise.all([core, import(`./highlight-${language}.js`)]);
  highlighter.registerLanguage(language, grammar.default);
  loaded.set(language, (code) => (code.innerHTML = highlighter.highlight(code.textContent, { language, ignoreIllegals: true }).value));
}

// Highlights the text of an element: at once if the language is there, so that a block that grows does not flicker.
export async function highlight(code, name) {
  const lower = name.toLowerCase();
  const language = OTHER_NAMES[lower] ?? lower;
  if (!FILES.includes(language) || code.textContent.length > MOST_CHARACTERS) return;
  if (!loaded.has(language)) loaded.set(language, load(language));
  if (loaded.get(language) instanceof Promise) await loaded.get(language);
  loaded.get(language)(code);
}
