// Shows Markdown from a model, which is untrusted: HTML stays text, images become links, and links must be http(s).

import { highlight } from "./code.js";
import { drawFormula } from "./formulas.js";
import { copyButton } from "./icons.js";
import { element } from "./show.js";

const markdown = window.markdownit({ html: false, linkify: true, breaks: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // `file.py` is no address
markdown.validateLink = (url) => /^https?:\/\//i.test(url);

// Markdown would take backslashes and underscores of formulas for its own. Formulas between single dollars begin and end
// without a space, and no letter or digit is next to them, unlike prices.
const FORMULA = /\\\(.{1,2000}?\\\)|\\\[.{1,2000}?\\\]|\\begin\{(\w+\*?)\}.{1,2000}?\\end\{\1\}|\$\$.{1,2000}?\$\$|(?<![\w$])\$(?!\s)[^$\n]{0,2000}?[^\s$\\]\$(?!\w)/sy;
const BREAK = /<br ?\/?>/iy;

function inline(name, before, pattern, add) {
  markdown.inline.ruler.before(before, name, (state, isSilent) => {
    pattern.lastIndex = state.pos;
    const [text] = pattern.exec(state.src) ?? [];
    if (text === undefined) return false;
    if (!isSilent) add(state, text);
    state.pos += text.length;
    return true;
  });
}

inline("formula", "escape", FORMULA, (state, text) => (state.push("formula", "code", 0).content = text));
inline("br", "autolink", BREAK, (state) => state.push("hardbreak", "br", 0));

// A formula on lines of its own becomes a block.
markdown.block.ruler.before("fence", "formula", (state, from, to, isSilent) => {
  const start = state.bMarks[from] + state.tShift[from];
  if (!/^(\\\[|\$\$|\\begin)/.test(state.src.slice(start, start + 6))) return false;
  FORMULA.lastIndex = start;
  const [text] = FORMULA.exec(state.src) ?? [];
  const last = from + (text?.split("\n").length ?? 0) - 1;
  if (last < from || last >= to || state.src.slice(start + text.length, state.eMarks[last]).trim()) return false;
  if (isSilent) return true;
  state.line = last + 1;
  const token = state.push("formula", "code", 0);
  const content = state.getLines(from, state.line, state.blkIndent, false).trim(); // without the marks of a quotation
  Object.assign(token, { block: true, content, map: [from, state.line] });
  return true;
}, { alt: ["paragraph", "list", "blockquote"] });

// The boxes of a list of tasks become signs.
markdown.core.ruler.push("tasks", ({ tokens }) => {
  tokens.forEach(({ type, children }, place) => {
    const [box] = children ?? [];
    if (type !== "inline" || tokens[place - 2]?.type !== "list_item_open" || !/^\[[ x]\] /i.test(box?.content)) return;
    tokens[place - 2].attrSet("class", "task");
    box.content = `${box.content[1] === " " ? "☐" : "☑"}${box.content.slice(3)}`;
  });
});

const { rules } = markdown.renderer;
const { escapeHtml } = markdown.utils;
const opened = (url) => `<a href="${escapeHtml(url)}" title="${escapeHtml(url)}" rel="noopener noreferrer" target="_blank">`;
rules.link_open = (tokens, index) => opened(tokens[index].attrGet("href"));
rules.image = (tokens, index, options, env, renderer) => {
  const { children, attrGet } = tokens[index];
  const text = renderer.renderInlineAsText(children, options, env);
  return `${opened(attrGet.call(tokens[index], "src"))}image: ${escapeHtml(text)}</a>`;
};
for (const cell of ["th_open", "td_open"]) {
  rules[cell] = (tokens, index) => {
    const isRight = tokens[index].attrGet("style") === "text-align:right"; // the CSP allows no inline styles
    return `<${tokens[index].tag}${isRight ? ' class="number"' : ""}>`;
  };
}
rules.formula = (tokens, index) => {
  const code = `<code class="formula">${escapeHtml(tokens[index].content)}</code>`;
  return tokens[index].block ? `<p>${code}</p>\n` : code;
};
// The page has its own headings above these.
const lowered = (tag) => `h${Math.min(6, Number(tag[1]) + 2)}`;
rules.heading_open = (tokens, index) => `<${lowered(tokens[index].tag)}>`;
rules.heading_close = (tokens, index) => `</${lowered(tokens[index].tag)}>`;

// Shows the text in `box`, with an element for each of its blocks. Unchanged blocks keep their elements, so a growing
// text costs little, and a selection in it stays. Formulas stay in TeX if it `isSource`. Returns the blocks, each with
// its `element` and the `lines` of its source, [from, to].
export function showMarkdown(box, text, isSource = false) {
  const found = blocks(text);
  found.forEach((block, place) => {
    const shown = box.children[place];
    const isSame = shown?.source === block.html;
    block.element = isSame ? shown : newBlock(block.html, isSource);
    block.element.source = block.html;
    if (!shown) box.append(block.element);
    else if (!isSame) shown.replaceWith(block.element);
  });
  while (box.children.length > found.length) box.lastChild.remove();
  return found;
}

function blocks(text) {
  const environment = {};
  const tokens = markdown.parse(text, environment);
  const found = [];
  let from = 0;
  let depth = 0;
  tokens.forEach(({ nesting }, place) => {
    depth += nesting;
    if (depth) return;
    const own = tokens.slice(from, place + 1);
    const [first, end] = own[0].map;
    const isFence = own[0].type === "fence"; // its first line is not part of the text
    found.push({ html: markdown.renderer.render(own, markdown.options, environment), lines: [isFence ? first + 1 : first, end] });
    from = place + 1;
  });
  return found;
}

function newBlock(html, isSource) {
  const made = element("div", { class: "block", dir: "auto" });
  made.innerHTML = html;
  for (const pre of made.querySelectorAll("pre")) {
    const code = pre.firstElementChild;
    const language = code.className.replace("language-", "");
    code.removeAttribute("class");
    pre.tabIndex = 0; // so that keys can scroll wide code
    const box = element("div", { class: "code-box" });
    pre.replaceWith(box);
    box.append(pre, copyButton("Copy code", () => code.textContent));
    highlight(code, language);
  }
  if (!isSource) for (const code of made.querySelectorAll(".formula")) drawFormula(code);
  return made;
}
