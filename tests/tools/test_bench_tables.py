"""The tables of measured rounds, as the documentation has them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import markdown
from tools.bench import step, table
from tools.bench.client import MOST_MISSING, RunFailed, arguments, read_result
from tools.bench.workloads import MEASURES, WORKLOADS, Measure

DOCS = Path(__file__).parents[2] / "docs"


def server(*speeds: float | None, start_seconds: float = 2.0, **problems: str) -> dict[str, Any]:
    """Make a server's rounds with these speeds in W1; None is a round without one."""
    runs = [{} if speed is None else {"W1": {"output_throughput": speed, "other_cores": 0.05}} for speed in speeds]
    rounds = [{"start_seconds": start_seconds, "workloads": run} for run in runs]
    return {"version": "1", "command": "serve", "rounds": rounds, "problems": problems}


def test_a_ratio_is_to_the_best_median_of_a_peer_in_rounds_that_both_have() -> None:
    ours, best = server(10, None, 30), server(5, 5, 10, start_seconds=8)
    servers = {"oaiserve": ours, "a": server(1, 50, 2), "b": best, "c": server()}
    found = "\n".join(table.comparison(servers))
    assert "| b | **2.50 (2.00..3.00)** | ≥ 1.25 times |" in found
    assert "| a | **1.00 (1.00..1.00)** | ≤ 2 s |" in found
    assert "| W1 | output, tokens/s | 90.0 |  |  | ≥ 1.25 times |" in table.comparison({"oaiserve": server(90.0)})


def test_spread_is_median_least_and_most() -> None:
    assert table.spread([3.0, 1.0, 200.0]) == "3.00 (1.00..200)"
    assert table.spread([12.34]) == "12.3"
    assert table.spread([]) == ""
    assert markdown.number(12345.6) == "12,346"
    assert markdown.number(7) == "7"


def test_a_report_has_ratios_and_problems() -> None:
    servers = {"oaiserve": server(20.0, 30.0), "peer": server(10.0, 10.0, W6="not finished within 5 s")}
    results = {"machine": "M", "created": "D", "client": "C", "is_short": False, "servers": servers}
    text = table.report(results)
    assert "| W1 | output, tokens/s | 25.0 (20.0..30.0) | 10.0 (10.0..10.0) | peer | **2.50 (2.00..3.00)** |" in text
    assert "used 0.05 cores" in text
    assert "- peer, W6: not finished within 5 s" in text


def test_text_replaces_what_stands_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\n<!-- end of a -->\nafter\n")
    for text in ("one\n", "two"):
        markdown.write_between(page, "a", text)
    assert page.read_text() == "before\n<!-- a -->\n\ntwo\n\n<!-- end of a -->\nafter\n"
    with pytest.raises(ValueError, match="no lines '<!-- b -->' and '<!-- end of b -->'"):
        markdown.write_between(page, "b", "text")


@pytest.mark.parametrize(
    ("results", "report", "page", "markers"),
    [("cpu-peers", table.report, "benchmarks", "cpu-peers"), ("step", step.report, "measurements", "decode-step")],
)
def test_the_tables_of_a_page_are_those_of_its_results(
    results: str, report: Callable[[dict[str, Any]], str], page: str, markers: str
) -> None:
    text = report(json.loads((DOCS / f"benchmarks/{results}.json").read_text()))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    shown = (
        (DOCS / f"{page}.md").read_text().partition(f"<!-- {markers} -->")[2].partition(f"<!-- end of {markers} -->")
    )
    assert rows == [line for line in shown[0].splitlines() if line.startswith("|")]


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_the_load_generator_gets_the_workload_as_arguments(workload: Any) -> None:
    words = arguments(workload, 7, "http://x", Path("/tmp/r.json"))
    options = dict(itertools.pairwise(words))
    assert options["--num-prompts"] == str(workload.num_requests)
    assert options["--seed"] == "7"
    assert options["--request-rate"] == ("2.3" if workload.name == "W4" else "inf")
    assert ("--max-concurrency" in options) == (workload.name != "W4")
    assert "--ignore-eos" in words


def test_every_round_of_every_workload_has_new_prompts() -> None:
    seeds = [workload.seed(number) for workload in WORKLOADS.values() for number in range(10)]
    assert len(set(seeds)) == len(seeds)


RESULT = {"duration": 2.0, "output_throughput": 5.0, "total_token_throughput": 9.0} | {
    f"{percentile}_{kind}_ms": 1.0 for kind in ("ttft", "tpot", "itl", "e2el") for percentile in ("p50", "p99")
}


def test_a_run_reports_what_is_missing_and_fails_if_too_much_is() -> None:
    workload = WORKLOADS["W1"]
    figures = read_result(RESULT | {"completed": 15, "total_output_tokens": 15 * 128 - 3}, workload)
    assert figures["missing_requests"] == 1
    assert figures["missing_tokens"] == 131
    completed = int(workload.num_requests * (1 - MOST_MISSING)) - 1
    with pytest.raises(RunFailed, match="5 of 16 requests were not answered"):
        read_result(RESULT | {"completed": completed, "total_output_tokens": completed * 128}, workload)


def test_a_single_token_has_no_time_between_tokens() -> None:
    whole = RESULT | {"completed": 256, "total_output_tokens": 256}
    assert "itl_p50_ms" not in read_result(whole, WORKLOADS["W6"])


@pytest.mark.parametrize("measure", [one for one in MEASURES if one.workload], ids=lambda one: one.workload)
def test_every_run_has_the_measures_of_its_workload(measure: Measure) -> None:
    workload = WORKLOADS[measure.workload or ""]
    tokens = workload.num_requests * workload.output_len
    complete = {"completed": workload.num_requests, "total_output_tokens": tokens}
    assert measure.key in read_result(RESULT | complete, workload)
