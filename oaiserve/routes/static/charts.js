// The tiles and the charts of the live view.

import { clock, duration, element, number, percent } from "./show.js";

const QUANTILE_LINES = [[50, "p50", "--decode"], [95, "p95", "--prefill"], [99, "p99", "--queue"]];
const quantiles = (name) => QUANTILE_LINES.map(([q, label, color]) => [`${name}_${q}`, label, color]);
const quantilePair = (name) => (now) => [duration(now[`${name}_50`]), `p95 ${duration(now[`${name}_95`])}`];

const CHARTS = [
  { title: "Requests", unit: "ended per second", show: number, lines: [["finished", "finished", "--good"], ["cancelled", "cancelled", "--warn"], ["rejected", "rejected", "--prefill"], ["failed", "failed", "--bad"]] },
  { title: "Tokens", unit: "per second", show: number, lines: [["computed", "computed in steps", "--decode"], ["generated", "generated, of ended requests", "--respond"]] },
  { title: "Running and waiting", unit: "requests", show: number, lines: [["running", "running", "--decode"], ["waiting", "waiting", "--queue"]] },
  { title: "Time to first token", unit: "of the last minute", show: duration, lines: quantiles("time_to_first_token") },
  { title: "Between tokens", unit: "of the last minute", show: duration, lines: quantiles("inter_token") },
  { title: "KV cache", unit: "share of its blocks", show: percent, top: 1, lines: [["kv_usage", "used", "--prefill"], ["kv_cached", "free, but still known", "--respond"]] },
];
const TILES = [
  ["Requests/s", (now) => [number(now.requests), now.failed + now.rejected > 0 ? `${number(now.failed + now.rejected)} not served` : "all served"]],
  ["Tokens/s", (now) => [number(now.computed), "in and out"]],
  ["First token", quantilePair("time_to_first_token")],
  ["Between tokens", quantilePair("inter_token")],
  ["Whole answer", quantilePair("duration")],
  ["Running", (now) => [number(now.running), "in the batch"]],
  ["Waiting", (now) => [number(now.waiting), "not begun"]],
  ["KV cache", (now) => [percent(now.kv_usage), `${percent(now.kv_cached)} reusable`]],
];
// Lines differ not by colour alone.
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];
const HEIGHT = 150;
const LEAST_SECONDS = 60; // on the time axis

export class Charts {
  constructor(tiles, charts) {
    this.tiles = TILES.map(([name, read]) => {
      const value = element("dd", {}, "–");
      const more = element("dd", { class: "more" }, "\u00a0");
      tiles.append(element("div", {}, element("dt", {}, name), value, more));
      return { value, more, read };
    });
    this.panels = CHARTS.map((chart) => {
      const plot = element("div", { role: "img" });
      const values = chart.lines.map(() => element("b", {}, "–"));
      const entries = chart.lines.map(([, label, color], position) =>
        element("li", {}, swatch(color, position), label, " ", values[position]),
      );
      const legend = element("ul", { class: "legend", "aria-hidden": "true" }, ...entries); // the plot's label says the same
      const title = element("h2", {}, chart.title, " ", element("small", {}, chart.unit));
      charts.append(element("div", { class: "chart" }, title, plot, legend));
      return { chart, plot, values, drawn: null };
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#redraw());
    new ResizeObserver(() => this.#resize()).observe(charts);
  }

  show(points) {
    this.points = points;
    const now = points.latest;
    if (!now) return;
    for (const { value, more, read } of this.tiles) [value.textContent, more.textContent] = read(now);
    for (const panel of this.panels) {
      const { chart, plot } = panel;
      const data = [points.column("time"), ...chart.lines.map(([name]) => points.column(name))];
      panel.drawn ??= this.#draw(panel);
      panel.drawn.setData(data);
      const values = chart.lines.map(([name, label]) => `${label} ${chart.show(now[name])}`).join(", ");
      plot.setAttribute("aria-label", `${chart.title}, ${chart.unit}. Now: ${values}.`);
    }
  }

  #draw({ chart, plot, values }) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    // The values under the pointer, else the last ones.
    const tell = (drawn) => {
      const at = drawn.cursor.idx ?? drawn.data[0].length - 1;
      values.forEach((value, position) => (value.textContent = chart.show(drawn.data[position + 1][at])));
    };
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
    return new uPlot(
      {
        width: plot.clientWidth,
        height: HEIGHT,
        cursor: { drag: { x: false, y: false }, points: { size: 6 } },
        legend: { show: false },
        hooks: { setData: [tell], setCursor: [tell] },
        scales: {
          x: { range: (_, min, max) => [Math.min(min, max - LEAST_SECONDS), max] },
          y: { range: (_, min, max) => [0, chart.top ?? Math.max(max ?? 0, chart.show === duration ? 1e-3 : 1) * 1.1] },
        },
        axes: [
          { ...axis, size: 26, space: 70, values: (_, times, axis, space, step) => times.map((time) => clock(time * 1000).slice(0, step < 60 ? 8 : 5)) },
          { ...axis, size: 58, space: 28, values: (_, values) => values.map(chart.show) },
        ],
        series: [
          {},
          ...chart.lines.map(([, label, line], position) => ({
            label,
            stroke: color(line),
            width: 2,
            dash: DASHES[position],
            points: { show: false },
          })),
        ],
      },
      [[], ...chart.lines.map(() => [])],
      plot,
    );
  }

  #redraw() {
    for (const panel of this.panels) {
      panel.drawn?.destroy();
      panel.drawn = null;
    }
    if (this.points) this.show(this.points);
  }

  #resize() {
    for (const { drawn, plot } of this.panels) {
      if (drawn && plot.clientWidth > 0) drawn.setSize({ width: plot.clientWidth, height: HEIGHT });
    }
  }
}

function swatch(color, position) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  const line = svg.appendChild(document.createElementNS(namespace, "line"));
  svg.setAttribute("width", "20");
  svg.setAttribute("height", "6");
  for (const [name, value] of Object.entries({ x1: 0, x2: 20, y1: 3, y2: 3, "stroke-width": 2, "stroke-dasharray": DASHES[position].join(" ") })) line.setAttribute(name, value);
  line.style.stroke = `var(${color})`;
  return svg;
}
