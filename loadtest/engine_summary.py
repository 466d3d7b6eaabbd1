"""Renders a point that was measured on the engine in process as text: its settings, counts and times. Pure
functions."""

from __future__ import annotations

from typing import Any

from loadtest.tables import interval, ms, number, table, times_rows

TIMES = {
    "send_lag": "Submit lag",
    "submit": "Submit latency",
    "phase_tokenize_wait": "Tokenize wait",
    "phase_tokenize": "Tokenize",
    "phase_queue": "Queue wait",
    "phase_prefill": "Prefill to first token",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "Latency",
}


def render_engine(point: dict[str, Any], engine: dict[str, Any]) -> str:
    """Return the report of a point. With several runs, each figure is the mean over them."""
    runs = point["runs"]
    rows = engine_rows(point, engine)
    width = max(len(title) for title, _ in rows)
    lines = [
        f"== {point['label']}: {point['verdict']}, {len(runs)} run{'s' * (len(runs) > 1)}",
        *(f"{title.ljust(width)}  {value}" for title, value in rows),
        "",
        table(times_rows(point["summary"], TIMES)),
    ]
    if len(runs) > 1:
        lines.append("95 %: intervals over the runs")
    return "\n".join(lines)


def engine_rows(point: dict[str, Any], engine: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings, counts and rates of a point, each with its title."""
    return [*_settings(engine), *_counts(point["runs"]), *_submits(point, engine), *_rates(point)]


def _settings(engine: dict[str, Any]) -> list[tuple[str, str]]:
    if engine["mode"] == "offline":
        stream_interval = "whole answers"
    else:
        stream_interval = f"{engine['stream_interval']}"
    return [
        ("Model", engine["model"]),
        ("Device", f"{engine['device']}, {engine['dtype']}"),
        ("Pretok", _on(engine["pretok"])),
        ("Tokenize workers", f"{engine['tokenize_workers']}"),
        ("Stream interval", stream_interval),
        ("Paged attention", engine["paged_attention"]),
        ("CUDA graphs", engine["cuda_graphs"]),
        ("NVTX", _on(engine["nvtx"])),
    ]


def _counts(runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    def mean(name: str) -> str:
        return f"{sum(run['metrics'][name] for run in runs) / len(runs):,.0f}"

    each = " a run" if len(runs) > 1 else ""
    return [
        ("Requests", f"{mean('num_requests')}{each}, ok {mean('num_ok')}"),
        ("Prompt tokens", f"{mean('prompt_tokens')}{each}, cached {mean('cached_tokens')}"),
        ("Completion tokens", f"{mean('completion_tokens')}{each}"),
    ]


def _submits(point: dict[str, Any], engine: dict[str, Any]) -> list[tuple[str, str]]:
    if engine["submit_interval_ms"] or point["arrivals"]["arrival"] == "at-once":
        when = f"{engine['submit_interval_ms']:g} ms, {engine['submit_schedule']} schedule"
    else:
        when = f"by --arrival {point['arrivals']['arrival']}"
    wall = point["summary"]["submit_wall"]
    return [("Submit wall", f"{ms(wall['mean'])} ms{_between(interval(wall, ms))}"), ("Submit interval", when)]


def _rates(point: dict[str, Any]) -> list[tuple[str, str]]:
    summary = point["summary"]
    rates = [
        ("Throughput", "completion_tokens_per_second", "completion tokens/s"),
        ("", "total_tokens_per_second", "tokens/s with those of prompts"),
        ("", "requests_per_second", "requests/s"),
    ]
    if point["runs"][0]["metrics"]["slo_attainment"].keys() != {"all"}:
        rates.append(("Goodput", "goodput_per_second", "requests/s within the SLO"))
    return [
        (title, f"{number(summary[name]['mean'])} {unit}{_between(interval(summary[name], number))}")
        for title, name, unit in rates
    ]


def _between(bounds: str) -> str:
    return f" (95 %: {bounds})" if bounds else ""


def _on(value: bool) -> str:
    return "on" if value else "off"
