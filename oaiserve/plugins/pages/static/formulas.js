// Draws formulas, which are in TeX, as MathML. Temml, which does this, is loaded with the first formula.

import { element } from "./show.js";

const BOUNDS = { maxSize: [20, 300], maxExpand: 500 }; // em, points, and expansions of macros
const REFERENCES = ["id", "href"]; // an id could be one of the page's
let temml = null; // a promise, and then the library

async function load() {
  document.head.append(element("link", { rel: "stylesheet", href: new URL("temml.css", import.meta.url).href }));
  temml = (await import("./temml.js")).default;
}

// Returns a formula in which ^ and _ within \text are signs: TeX refuses them there, but models write \text{O(n^2)}.
function withSigns(formula) {
  return formula.replace(/\\text\{[^{}$\\]*\}/g, (text) => text.replaceAll("^", "\\textasciicircum ").replaceAll("_", "\\_"));
}

// Replaces an element, whose text is a formula with its delimiters, by the drawn formula: at once if the library is
// there, so that a text that grows does not flicker. Text that is not TeX stays as it is.
export async function drawFormula(code) {
  temml ??= load();
  if (temml instanceof Promise) await temml;
  const text = code.textContent;
  const isDisplayed = /^(\$\$|\\\[|\\b)/.test(text);
  const numOutside = text.startsWith("\\b") ? 0 : /^\$[^$]/.test(text) ? 1 : 2;
  const drawn = element("span", { class: isDisplayed ? "drawn display" : "drawn" });
  try {
    temml.render(withSigns(text.slice(numOutside, text.length - numOutside)), drawn, { displayMode: isDisplayed, throwOnError: true, ...BOUNDS });
  } catch (error) {
    return console.debug(`${text} is shown in TeX: ${error.message}`);
  }
  for (const node of drawn.querySelectorAll("*")) for (const name of REFERENCES) node.removeAttribute(name);
  code.replaceWith(drawn);
}
