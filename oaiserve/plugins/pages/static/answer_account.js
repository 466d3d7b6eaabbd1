// The account of a step: one quiet line with its speed, which opens into its phases and their causes.

import { phasesOf } from "./ask.js";
import { Axis } from "./axis.js";
import { linked } from "./linked.js";
import { sharedLegend } from "./shades.js";
import { choice, count, duration, element, phaseSpans, placeBar, words } from "./show.js";
import { pageOf } from "./sse.js";
import { legend } from "./tokens.js";

const SHOWN_SHARE = 0.01; // the smallest share of a phase with a row of its own
const VIEWS = [["text", "Off"], ["cost", "Cost"], ["certainty", "Certainty"]];

export class Account {
  view = "text"; // or one of the VIEWS of tokens.js

  // `redraw()` is called when another view is chosen.
  constructor(step, redraw) {
    this.step = step;
    this.bar = element("span", { class: "track bar", "aria-hidden": "true" });
    this.line = element("span", { class: "line" });
    this.rows = element("div", { class: "rows" });
    this.why = element("div", { class: "why" });
    this.shades = element("ul", { class: "legend", "aria-label": "Shades of tokens" });
    const panel = element("div", { class: "card" }, this.rows, this.why);
    const choose = (view) => {
      this.view = view;
      this.shades.replaceChildren(...(view === "text" ? [] : legend(view)));
      redraw();
      panel.scrollIntoView({ block: "nearest" });
    };
    this.views = element("div", { class: "views" }, element("span", {}, "Shade tokens"), choice("Shade tokens", VIEWS, this.view, choose));
    panel.append(this.views, this.shades);
    this.element = element("details", { class: "account" }, element("summary", {}, this.bar, this.line), panel);
    this.element.addEventListener("toggle", () => {
      this.draw();
      if (this.element.open) panel.scrollIntoView({ block: "nearest" });
    });
  }

  // Draws the line, and the rest if it is open. `totalNs` is the length of the bar, and `more` are other sentences.
  draw(totalNs = this.totalNs, more = this.more) {
    const { step } = this;
    this.totalNs = totalNs;
    this.more = more;
    const phases = phasesOf(step);
    const axis = new Axis([[0, Math.max(1, totalNs) * 1e-6]], () => "");
    const spans = phaseSpans(0, phases);
    placeBar(this.bar, spans, axis);
    this.line.textContent = summary(step, phases);
    if (!this.element.open) return;
    const whole = sum(phases);
    const shown = spans.filter((_, place) => phases[place][1] >= SHOWN_SHARE * whole);
    const isShaded = shown.some(([, , , alone]) => alone !== undefined);
    this.rows.replaceChildren(...shown.map((span) => row(span, axis)), ...(isShaded ? [sharedLegend()] : []));
    const since = step.isContinued ? ["These are the times since the answer went on."] : [];
    const sentences = [...since, ...step.why, counts(step), ...more].filter(Boolean);
    const link = step.hasAccount ? [element("a", { href: pageOf(step.requestId) }, "Open this request")] : [];
    this.why.replaceChildren(...sentences.map((text) => element("p", {}, ...linked(text, step.whyRequests ?? []))), ...link);
    this.views.hidden = step.isOpen || !step.tokens.length;
  }
}

export function sum(phases) {
  return phases.reduce((total, [, ns]) => total + ns, 0);
}

function row(span, axis) {
  const [name, from, to] = span;
  const track = element("span", { class: "track" });
  placeBar(track, [span], axis);
  return element("div", { class: "row" }, element("span", {}, words(name)), track, element("span", {}, duration((to - from) / 1e3)));
}

function summary(step, phases) {
  const { usage, isOpen, eventsMs } = step;
  const tokens = usage?.completion_tokens ?? step.tokens.length;
  const decoding = phases.filter(([name]) => name === "decode");
  const seconds = isOpen ? (eventsMs.at(-1) - eventsMs[0]) / 1e3 : sum(decoding) / 1e9;
  const rate = tokens > 1 && seconds > 0 ? [`${((tokens - 1) / seconds).toFixed(1)} tok/s`] : [];
  const took = isOpen ? performance.now() - step.sentMs : sum(phases) / 1e6 || (step.tookMs ?? 0);
  const number = tokens ? [`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`] : [];
  return [...rate, ...number, duration(took / 1e3)].join(" · ");
}

function counts({ usage, isOpen, hasAccount }) {
  if (!usage || isOpen) return "";
  const details = usage.prompt_tokens_details ?? {};
  const { cached_tokens: cached = 0, image_tokens: pictures, read_again_tokens: again, read_again_reason: reason } = details;
  const thought = usage.completion_tokens_details?.reasoning_tokens;
  const ofPictures = pictures ? `, ${count(pictures)} of them for pictures` : "";
  const ofAgain = again && !hasAccount ? ` ${count(again)} were read again (${words(reason)}).` : ""; // or an account says it
  const prompt = `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens came from the cache${ofPictures}.${ofAgain}`;
  return thought ? `${prompt} ${count(thought)} of ${count(usage.completion_tokens)} generated tokens are reasoning.` : prompt;
}
