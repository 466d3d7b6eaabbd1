// Shows Markdown that a model has written. Nobody trusts it: HTML stays text, images become links, and a link has to be
// one of the web.

import { element } from "./show.js";

const markdown = window.markdownit({ html: false, linkify: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // `file.py` is no address
markdown.validateLink = (url) => /^https?:\/\//i.test(url);

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
    const isRight = tokens[index].attrGet("style") === "text-align:right"; // the page allows no styles in its text
    return `<${tokens[index].tag}${isRight ? ' class="number"' : ""}>`;
  };
}

export function showMarkdown(box, text) {
  box.innerHTML = markdown.render(text);
  for (const code of box.querySelectorAll("pre")) {
    code.tabIndex = 0; // wide code is scrolled, by keys as well
    const block = element("div", { class: "block" });
    code.replaceWith(block);
    block.append(code, copyButton("Copy code", () => code.textContent));
  }
}

// Returns a button that copies a text. Without HTTPS, pages of other machines have no clipboard but the selection's.
export function copyButton(label, text) {
  const copy = async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else {
      const box = document.body.appendChild(element("textarea", { class: "unseen" }, text()));
      box.select();
      document.execCommand("copy");
      box.remove();
      button.focus();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 2000);
  };
  const button = element("button", { type: "button", class: "copy", onclick: copy }, label);
  return button;
}
