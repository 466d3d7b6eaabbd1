"""The tables of measured rounds, as the documentation has them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import markdown
from tools.bench import compare, table
from tools.bench.client import MOST_MISSING, RunFailed, arguments, read_result
from tools.bench.workloads import MEASURES, WORKLOADS, Measure

SPEED = Measure("output", "tokens/s", "output_throughput", "W1", more_is_better=True, goal=1.25)
WAIT = Measure("TTFT p50", "ms", "ttft_p50_ms", "W1", goal=0.5)
START = Measure("start", "s", "start_seconds", limit=6)


def rounds(*speeds: float | None) -> table.Rounds:
    return [{"workloads": {} if speed is None else {"W1": {"output_throughput": speed}}} for speed in speeds]


def server(*speeds: float | None, **problems: str) -> dict[str, Any]:
    return {"version": "1", "command": "serve", "rounds": rounds(*speeds), "problems": problems}


def test_values_are_those_of_the_workload_or_of_the_server() -> None:
    measured = [{"start_seconds": 2.0, "workloads": {"W1": {"output_throughput": 5.0}}}, {"workloads": {}}, {}]
    assert table.values(measured, SPEED) == {0: 5.0}
    assert table.values(measured, START) == {0: 2.0}
    assert table.values(measured, WAIT) == {}


def test_a_ratio_compares_only_rounds_that_both_have() -> None:
    assert table.ratios(rounds(10, None, 30), rounds(5, 5, 10), SPEED) == [2.0, 3.0]
    assert table.ratios(rounds(10, 20), rounds(5), SPEED) == [2.0]


def test_the_best_peer_is_the_highest_or_lowest_median_and_never_ours() -> None:
    servers = {"oaiserve": server(90), "a": server(1, 50, 2), "b": server(3, 3, 3), "c": server()}
    assert table.best_peer(servers, SPEED) == "b"
    less = Measure("", "", "output_throughput", "W1")
    assert table.best_peer(servers, less) == "a"
    assert table.best_peer({"oaiserve": server(90)}, SPEED) is None


@given(st.lists(st.floats(0.1, 1e5), min_size=2, max_size=5), st.floats(0.5, 4))
def test_a_server_that_is_faster_by_one_factor_has_this_ratio_in_every_round(
    theirs: list[float], factor: float
) -> None:
    ratios = table.ratios(rounds(*(factor * speed for speed in theirs)), rounds(*theirs), SPEED)
    assert ratios == pytest.approx([factor] * len(theirs))


def test_spread_is_median_least_and_most() -> None:
    assert table.spread([3.0, 1.0, 200.0]) == "3.00 (1.00..200)"
    assert table.spread([12.34]) == "12.3"
    assert table.spread([]) == ""
    assert markdown.number(12345.6) == "12,346"
    assert markdown.number(7) == "7"


def test_goals_name_their_direction() -> None:
    assert table.goal(SPEED) == "≥ 1.25 times"
    assert table.goal(WAIT) == "≤ 0.5 times"
    assert table.goal(START) == "≤ 6 s"
    assert table.goal(Measure("", "", "")) == ""


def test_a_report_has_ratios_and_problems() -> None:
    run = {"seconds": 10.0, "other_cores": 0.05}
    servers = {"oaiserve": server(20.0, 30.0), "peer": server(10.0, 10.0, W6="not finished within 5 s")}
    for measured in servers.values():
        for figures in measured["rounds"]:
            figures["workloads"]["W1"] |= run
    results = {"machine": "M", "created": "D", "client": "C", "is_short": False, "servers": servers}
    text = table.report(results)
    assert "| W1 | output, tokens/s | 25.0 (20.0..30.0) | 10.0 (10.0..10.0) | peer | **2.50 (2.00..3.00)** |" in text
    assert "used 0.05 cores" in text
    assert "- peer, W6: not finished within 5 s" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| W1 | output, ")}
    assert widths == {line.count("|") for line in text.splitlines() if line.startswith("|  | measure")}


def test_rounds_continue_only_with_the_same_machine_and_versions() -> None:
    before = {"machine": "M", "created": "D", "client": "C", "is_short": False, "servers": {"ours": server(1.0)}}
    begun = before | {"created": "E", "servers": {"ours": server(), "peer": server()}}
    assert compare.joined(before, begun)["servers"] == {"ours": server(1.0), "peer": server()}
    for key, other in {"machine": "N", "client": "D", "is_short": True}.items():
        with pytest.raises(SystemExit, match=f"{key} was"):
            compare.joined(before, begun | {key: other})
    with pytest.raises(SystemExit, match="ours's version was 1, is 2"):
        compare.joined(before, begun | {"servers": {"ours": server() | {"version": "2"}}})


def test_text_replaces_what_stands_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\n<!-- end of a -->\nafter\n")
    for text in ("one\n", "two"):
        markdown.write_between(page, "a", text)
    assert page.read_text() == "before\n<!-- a -->\n\ntwo\n\n<!-- end of a -->\nafter\n"
    with pytest.raises(ValueError, match="no lines '<!-- b -->' and '<!-- end of b -->'"):
        markdown.write_between(page, "b", "text")


def test_the_documentation_has_the_markers() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name, file in (("cpu-peers", "benchmarks"), ("decode-step", "measurements")):
        page = (docs / f"{file}.md").read_text()
        assert f"<!-- {name} -->" in page
        assert f"<!-- end of {name} -->" in page


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_the_load_generator_gets_the_workload_as_arguments(workload: Any) -> None:
    words = arguments(workload, 7, "http://x", "m", Path("/tmp/r.json"))
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
    assert "ttft_p50_ms" in read_result(whole, WORKLOADS["W6"])


def test_every_run_has_the_measures_of_its_workload() -> None:
    for measure in MEASURES:
        if measure.workload is not None:
            workload = WORKLOADS[measure.workload]
            complete = {
                "completed": workload.num_requests,
                "total_output_tokens": workload.num_requests * workload.output_len,
            }
            assert measure.key in read_result(RESULT | complete, workload)
