"""The tables of measured rounds, as the documentation has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import Arrivals
from loadtest.prompts import Workload as LoadTestWorkload
from loadtest.prompts import make_calls
from tools import load, markdown
from tools.bench import agents, client, step, table
from tools.bench.workloads import MEASURES, WORKLOADS, Measure, Workload

LOAD_TEST_OPTIONS = {one.name for kind in (LoadTestWorkload, Arrivals) for one in fields(kind)} | {"warmup"}
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
def test_the_load_test_knows_the_flags_of_each_workload(workload: Workload) -> None:
    flags = client.options(workload, 7)
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= LOAD_TEST_OPTIONS
    assert flags["--num-requests"] == workload.num_requests
    assert ("--rate" in flags, "--concurrency" in flags) == ((True, False) if workload.name == "W4" else (False, True))


def test_every_round_of_every_workload_has_new_prompts() -> None:
    seeds = [workload.seed(number) for workload in WORKLOADS.values() for number in range(10)]
    assert len(set(seeds)) == len(seeds)


DISTRIBUTION = {"p50": 0.001, "p99": 0.002}
METRICS: dict[str, Any] = {
    "window_seconds": 2.0,
    "completion_tokens_per_second": 5.0,
    "total_tokens_per_second": 9.0,
    "distributions": dict.fromkeys(("ttft", "tpot", "itl", "latency"), DISTRIBUTION),
}


def test_a_run_reports_what_is_missing() -> None:
    found = client.figures(METRICS | {"num_ok": 15, "completion_tokens": 15 * 128 - 3}, WORKLOADS["W1"])
    assert (found["missing_requests"], found["missing_tokens"], found["itl_p99_ms"]) == (1, 131, 2.0)


def test_a_single_token_has_no_time_between_tokens() -> None:
    single = METRICS | {
        "num_ok": 256,
        "completion_tokens": 256,
        "distributions": {**METRICS["distributions"], "itl": None},
    }
    assert "itl_p50_ms" not in client.figures(single, WORKLOADS["W6"])


@pytest.mark.parametrize(("failed", "most"), [(1, 0.0), (5, 0.25)])
def test_a_run_with_too_many_failed_requests_is_none(monkeypatch: pytest.MonkeyPatch, failed: int, most: float) -> None:
    metrics: dict[str, Any] = {"num_requests": 16, "error_messages": {}}

    def write_report(command: list[str], **_: Any) -> None:
        path = Path(command[command.index("--json") + 1])
        path.write_text(json.dumps({"points": [{"runs": [{"metrics": metrics}]}]}))

    monkeypatch.setattr(load.subprocess, "run", write_report)
    metrics["errors"] = {"timeout": failed - 1}
    assert load.run_bench("http://x", {}, most_failed=most)["runs"]
    metrics["errors"] = {"timeout": failed}
    with pytest.raises(load.RunFailed, match="timeout"):
        load.run_bench("http://x", {}, most_failed=most)


@pytest.mark.parametrize("measure", [one for one in MEASURES if one.workload], ids=lambda one: one.workload)
def test_every_run_has_the_measures_of_its_workload(measure: Measure) -> None:
    workload = WORKLOADS[measure.workload or ""]
    assert measure.key in client.figures(METRICS | {"num_ok": 1, "completion_tokens": 1}, workload)


def test_sessions_of_agents_share_a_prefix_and_are_the_same_for_all_servers(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(agents.trace(3, 4))
    assert agents.trace(3, 4) == path.read_text() != agents.trace(4, 4)
    calls = make_calls(LoadTestWorkload(requests=path), 0)
    systems, tasks = ({call.body["messages"][place]["content"] for call in calls} for place in (0, 1))
    assert (len(calls), len(systems), len(tasks)) == (4, 1, 4)
    assert {len(call.next_turns) for call in calls} == {agents.TURNS - 1}


def test_the_table_of_agents_has_medians_by_users_and_server() -> None:
    figures = dict.fromkeys([*agents.FIGURES, "MiB"], 4.0)
    runs = [{"server": "a", "users": 8} | figures | {"sessions/hour": rate} for rate in (300.0, 100.0, 200.0)]
    text = agents.report({"machine": "M", "created": "D", "runs": [*runs, {"server": "b", "users": 2} | figures]})
    assert text.splitlines()[-1].startswith("| 8 | a | 200 (100..300) | 4.00 |")
    assert text.splitlines()[-2].startswith("| 2 | b | 4.00 (4.00..4.00) |")
