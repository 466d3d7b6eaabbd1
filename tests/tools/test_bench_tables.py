"""The tables of measured rounds, as the documentation has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.bench import limits, step, table
from tools.bench.workloads import WORKLOADS

DOCS = Path(__file__).parents[2] / "docs"


def server(*speeds: float | None, start_seconds: float = 2.0, **problems: str) -> dict[str, Any]:
    """Make a server's rounds with these speeds in W1; None is a round without one."""
    runs = [{} if speed is None else {"W1": {"output_throughput": speed, "other_cores": 0.05}} for speed in speeds]
    rounds = [{"start_seconds": start_seconds, "workloads": run} for run in runs]
    return {"version": "1", "command": "serve", "rounds": rounds, "problems": problems}


def test_a_ratio_is_to_the_best_median_of_a_peer_in_rounds_that_both_have() -> None:
    ours = server(10, None, 30)
    best = server(5, 5, 10, start_seconds=8)
    servers = {"oaiserve": ours, "a": server(1, 50, 2), "b": best, "c": server()}
    text = "\n".join(table.comparison(servers))
    assert "| b | **2.50 (2.00..3.00)** | ≥ 1.25 times |" in text
    assert "| a | **1.00 (1.00..1.00)** | ≤ 2 s |" in text
    assert "| W1 | output, tokens/s | 90.0 |  |  | ≥ 1.25 times |" in table.comparison({"oaiserve": server(90.0)})


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


def test_every_round_of_every_workload_has_new_prompts() -> None:
    seeds = [workload.seed(number) for workload in WORKLOADS.values() for number in range(10)]
    assert len(set(seeds)) == len(seeds)


def test_products_are_shown_as_shares_of_the_fastest_instruction_that_multiplies_such_numbers() -> None:
    narrow: limits.Measured = {}
    limits.add("vfmadd231ps 0 80\nvpmaddubsw 0 300\nfloat32 16 60\nQ8_0 16 90\n", narrow)
    limits.add("vfmadd231ps 0 70\nvpmaddubsw 0 310\nfloat32 16 20\nQ8_0 16 93\n", narrow)  # the most of both counts
    wide: limits.Measured = {}
    limits.add("vfmadd231ps 0 160\nvpdpbusd 0 620\nvpmaddubsw 0 600\nfloat32 16 80\nQ8_0 16 155\n", wide)
    results = {"machine": "A CPU", "created": "2026-12-01", "variants": {"wide": wide, "narrow": narrow}}
    assert limits.report(results).splitlines()[2:] == [
        "| numbers | wide: limit; 16 rows | narrow: limit; 16 rows |",
        "|---|---|---|",
        "| float32 | 160; 50 | 80.0; 75 |",
        "| Q8_0 | 620; 25 | 310; 30 |",
    ]
