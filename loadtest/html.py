"""Render a report as one HTML page with plots, without scripts and without other files. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from loadtest.client_health import VERDICTS
from loadtest.engine_summary import TIMES as ENGINE_TIMES
from loadtest.engine_summary import engine_rows
from loadtest.find_max import Bracket, answer, share
from loadtest.plots import Bar, Series, lines, stacks
from loadtest.report import (
    TIMES,
    client_lines,
    count_lines,
    has_slo,
    is_in_process,
    made_with,
    others,
    point_title,
    problems,
    rate_rows,
    server_line,
    server_rows,
    steady_lines,
    subject,
    sweep_rows,
)
from loadtest.tables import Rows, number, times_rows
from oaiserve.facts.times import PHASES, duration

STYLE = Path(__file__).with_name("report.css")
NETWORK = "network + client"
FIRST_PART = "to first token"
REST = "after it"
# The server's phases have their own colours in the style.
_COLORS = {name: name for name in PHASES} | {NETWORK: "quiet", FIRST_PART: "prefill", REST: "decode"}
_QUANTILES = (("p50", "decode"), ("p95", "prefill"), ("p99", "queue"))  # and their colours
_POINT_COLORS = ("decode", "prefill", "queue", "respond", "tokenize", "encode_media", "tokenize_wait", "receive")
_VERDICTS = {
    "valid": "The client kept up, so its figures can be trusted.",
    "suspect": "The client may have disturbed what it measured.",
    "invalid": "The client did not send what it should have. Don't use these figures.",
}
_BINS = 24
GOOD = 0.95  # The verdict is green from this share of good requests on.
POOR = 0.5  # Below this share, it is red.


def render_html(report: dict[str, Any], bracket: Bracket | None = None) -> str:
    """Return the whole page. `bracket` is the result of a search, whose rates are the points of the report."""
    points = report["points"]
    machine = report["environment"]
    parts = [
        f"<h1>Load test of {escape(subject(report))}</h1>",
        f'<p class="note">{escape(report["created"])}, {machine["cpus"]} CPUs, '
        f"load average {machine['load_average']:.1f}, {escape(made_with(report))}</p>",
        _verdict(report, bracket),
    ]
    if len(points) > 1:
        parts += [_table(sweep_rows(points), "Points"), _plots(_sweep_plots(report))]
    for point in points:
        parts.append(_point(point, report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _verdict(report: dict[str, Any], bracket: Bracket | None) -> str:
    """Return the headline: the rate that a search found, the share of good requests, or whether the figures can be
    trusted."""
    points = report["points"]
    if bracket is not None:
        headline = "No rate holds" if bracket.holds is None else f"{bracket.holds:.4g} requests/s"
        kept = f"For {share(bracket.attainment)} of the requests: {_limits(report)}."
        details = [f"{kept} {_capitalized(answer(bracket))}."]
        details += [f"Ended early: {bracket.problem}."] if bracket.problem else []
        name = "invalid" if bracket.holds is None else "suspect" if bracket.problem else "valid"
        return _headline(name, headline, details)
    name = max((point["verdict"] for point in points), key=VERDICTS.index)
    checks = [(point["label"], run.get("server", {}).get("check", {})) for point in points for run in point["runs"]]
    found = [(label, check["reason"]) for label, check in checks if check.get("status") == "disagree"]
    disagreeing = list(dict.fromkeys(found))
    details = [_VERDICTS[name]]
    if name != "valid":
        doubted = next(point for point in points if point["verdict"] == name)
        details += [f"{doubted['label']}: {line}" for line in client_lines(doubted) if line.startswith("because ")]
    headline = _capitalized(name)
    if disagreeing:
        found_others = [found for point in points for found in others(point)]
        if name == "valid" and found_others:
            headline = "Another client used the server"
            shares = [found["token_share"] for found in found_others if found["token_share"] is not None]
            had = "another client used the server"
            if shares:
                up_to = "up to " if len(shares) > 1 else ""
                had = f"{up_to}{max(shares):.0%} of the tokens were another client's"
            details = [f"The client kept up, but {had}, so these are figures of a shared server."]
            name = "suspect"
        elif name == "valid":
            headline = "Server and client disagree"
            details = ["The client kept up, but its figures and the server's don't fit together."]
            name = "suspect"
        details += [
            f"{label}: {reason.rstrip('?')}{'?' if reason.endswith('?') else '.'}" for label, reason in disagreeing
        ]
    if has_slo(points[0]) and len(points) == 1:
        good = points[0]["summary"]["slo_attainment"]["mean"]
        headline = f"{share(round(good, 3))} good"
        details.insert(0, f"Share of the requests that kept {_limits(report)}.")
        name = max(name, "valid" if good >= GOOD else "suspect" if good >= POOR else "invalid", key=VERDICTS.index)
    return _headline(name, headline, details)


def _limits(report: dict[str, Any]) -> str:
    return ", ".join(f"{metric} within {duration(limit * 1e9)}" for metric, limit in report["slos"].items())


def _headline(verdict: str, headline: str, details: Sequence[str]) -> str:
    below = "".join(f"<p>{escape(line)}</p>" for line in details)
    text = f'<p class="large">{escape(headline)}</p>{below}'
    return f'<section class="verdict {verdict}" aria-label="Verdict">{text}</section>'


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sweep_plots(report: dict[str, Any]) -> list[str]:
    """Return the plots of several points: times, goodput and phases by the rate, or by the number of users."""
    points = report["points"]
    by_rate = points[0]["arrivals"]["rate"] is not None
    x_title = "requests/s sent" if by_rate else "users"
    at = [point["arrivals"]["rate" if by_rate else "concurrency"] for point in points]
    figures = []
    for metric, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("latency", "Latency")):
        curves = [Series(name, color, _by(at, points, f"{metric}_{name}")) for name, color in _QUANTILES]
        limit = (report.get("slos") or {}).get(metric)
        figures.append(lines(f"{title} by load", x_title, "seconds", curves, limit=limit))
    rates = [Series("answered", "respond", _by(at, points, "requests_per_second"))]
    if has_slo(points[0]):
        rates.append(Series("good", "decode", _by(at, points, "goodput_per_second")))
    figures.append(lines("Goodput" if len(rates) > 1 else "Requests answered", x_title, "requests/s", rates))
    tokens = [Series("completion tokens", "decode", _by(at, points, "completion_tokens_per_second"))]
    figures.append(lines("Throughput", x_title, "tokens/s", tokens))
    means = [_mean_phases(_answered(point["runs"])) for point in points]
    if any(means):
        names = list(dict.fromkeys(name for phases in means for name in phases))
        bars = [Bar(i, i + 1, phases) for i, phases in enumerate(means)]
        parts = {name: (name.replace("_", " "), _COLORS.get(name, "receive")) for name in names}
        ticks = [f"{value:.3g}" for value in at]
        figures.append(stacks("Phases by load", x_title, "seconds, mean", bars, parts, ticks))
    return figures


def _by(at: Sequence[float], points: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (x, point["summary"][name]["mean"]) for x, point in zip(at, points, strict=True) if name in point["summary"]
    ]


def _point(point: dict[str, Any], report: dict[str, Any]) -> str:
    runs = point["runs"]
    summary = point["summary"]
    label = point_title(point) + (f", {len(runs)} runs" if len(runs) > 1 else "")
    parts = [f'<p class="problem">{escape(line)}</p>' for line in problems(runs)]
    parts += [_tiles(point), _plots(_point_plots(point))]
    if is_in_process(report):
        rows = [["", ""], *map(list, engine_rows(point, report["engine"]))]
        parts += [
            _table(rows, f"Settings, counts and rates, {point['label']}"),
            _table(times_rows(summary, ENGINE_TIMES), f"Times, {point['label']}"),
        ]
    else:
        parts += [
            _table(times_rows(summary, TIMES), f"Times, {point['label']}"),
            _table(rate_rows(point), f"Rates, {point['label']}"),
        ]
        parts.append(_list([*count_lines(runs), *steady_lines(runs[0]["metrics"]["steady"])]))
    parts.append(f"<details><summary>The client: {point['verdict']}</summary>{_list(client_lines(point))}</details>")
    if "server" in runs[-1]:
        rows = server_rows(point)
        parts.append(f"<h3>{escape(_capitalized(server_line(point)))}</h3>")
        parts.append(_table(rows, f"Times of the server, {point['label']}") if len(rows) > 1 else "")
    is_open = " open" if len(report["points"]) == 1 else ""
    head = f"<summary><h2>{escape(label)}</h2></summary>"
    return f'<details class="point"{is_open}>{head}{"".join(parts)}</details>'


def _tiles(point: dict[str, Any]) -> str:
    summary = point["summary"]
    tiles = [("Requests/s", number(summary["requests_per_second"]["mean"]), "answered")]
    if has_slo(point):
        kept = share(round(summary["slo_attainment"]["mean"], 3))
        tiles.append(("Goodput", number(summary["goodput_per_second"]["mean"]), f"requests/s, {kept} good"))
    tiles.append(("Tokens/s", number(summary["completion_tokens_per_second"]["mean"]), "written"))
    for metric, title in (("ttft", "First token"), ("tpot", "Per output token"), ("latency", "Whole answer")):
        if f"{metric}_p50" in summary:
            p50, p99 = (duration(summary[f"{metric}_{name}"]["mean"] * 1e9) for name in ("p50", "p99"))
            tiles.append((title, p50, f"p99 {p99}"))
    cells = (
        f'<div><dt>{escape(title)}</dt><dd class="value">{escape(value)}</dd><dd class="more">{escape(more)}</dd></div>'
        for title, value, more in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _point_plots(point: dict[str, Any]) -> list[str]:
    runs = point["runs"]
    requests = _answered(runs)
    first = Series("share of the requests", "prefill", _cdf([r["ttft"] for r in requests]))
    each = [
        Series(f"run {i + 1}", _POINT_COLORS[i % len(_POINT_COLORS)], [(r["intended"], r["latency"]) for r in answered])
        for i, answered in enumerate(_answered([run]) for run in runs)
    ]
    queues = [Series(name, color, _gauge(point, name)) for name, color in (("running", "decode"), ("waiting", "queue"))]
    usage = [Series("used", "prefill", _gauge(point, "kv_cache_usage"))]
    return [
        _phases_by_time(requests),
        lines("Time to first token: share within", "seconds", "share", [first], dots=False),
        lines("Latency of each request", "sent at, seconds", "seconds", each, curves=False),
        lines("Requests at the server", "seconds", "requests", queues, dots=False),
        lines("KV cache in use", "seconds", "share", usage, dots=False),
    ]


def _phases_by_time(requests: Sequence[dict[str, Any]]) -> str:
    """Plot the mean duration of each phase by time of sending, stacked. The phases are the server's if it reports them,
    else the two that the client sees: until the first token, and after it."""
    means = _mean_phases(requests)
    if not means:
        return ""
    width = max(request["intended"] for request in requests) / _BINS or 1.0
    bins: list[list[dict[str, Any]]] = [[] for _ in range(_BINS)]
    for request in requests:
        bins[min(_BINS - 1, int(request["intended"] / width))].append(request)
    bars = [Bar(i * width, (i + 1) * width, _mean_phases(each)) for i, each in enumerate(bins)]
    parts = {
        name: (f"{name.replace('_', ' ')} {duration(mean * 1e9)}", _COLORS.get(name, "receive"))
        for name, mean in means.items()
    }
    return stacks("Where the time goes", "sent at, seconds", "seconds, mean", bars, parts)


def _mean_phases(requests: Sequence[dict[str, Any]]) -> dict[str, float]:
    each = [_phases(request) for request in requests]
    names = dict.fromkeys(name for phases in each for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in each) / len(each) for name in names}


def _phases(request: dict[str, Any]) -> dict[str, float]:
    """Return the server's phases, and over the network also the rest of the latency. If the server reports none, return
    the two phases that the client sees."""
    phases: dict[str, float] = request["phases"]
    if len(phases) > 1:
        rest = {NETWORK: max(0.0, request["latency"] - sum(phases.values()))}
        return phases | rest if request["over_network"] else phases
    return {FIRST_PART: request["ttft"], REST: request["latency"] - request["ttft"]}


def _answered(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        request | {"over_network": "server" in run}
        for run in runs
        for request in run["requests"]
        if request["latency"] is not None
    ]


def _cdf(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points of the empirical distribution as steps, beginning with 0 at the smallest value."""
    ordered = sorted(values)
    return [(value, (i + up) / len(ordered)) for i, value in enumerate(ordered) for up in (0, 1)]


def _gauge(point: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """Return a gauge of the server during the last run; empty if its gauges were not read."""
    rows = point["runs"][-1].get("server", {}).get("gauges", {}).get("series", [])
    return [(row["at"], row[name]) for row in rows if row[name] is not None]


def _plots(figures: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(figures)}</div>'


def _table(rows: Rows, title: str) -> str:
    """Return a table that scrolls horizontally if it is too wide, also with the keyboard."""
    head, *body = ([escape(cell) for cell in row] for row in rows)
    top = "".join(f'<th scope="col">{cell}</th>' if cell else "<td></td>" for cell in head)
    below = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in body
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{below}</tbody></table></div>"
    )


def _list(items: Sequence[str]) -> str:
    return f'<ul class="lines">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'
