"""The charts of the documentation agree with the results that they are drawn from."""

from __future__ import annotations

import json
import re
import statistics
from xml.etree import ElementTree

import pytest

from tools import charts
from tools.bench.workloads import MEASURES

SVG = "{http://www.w3.org/2000/svg}"
IMAGES = charts.DOCS / "images"
BENCHMARKS = charts.DOCS / "benchmarks"


@pytest.mark.parametrize("name", charts.charts())
def test_the_charts_are_current(name: str) -> None:
    """If this fails, `python -m tools.charts` draws them again."""
    assert (IMAGES / name).read_text() == charts.charts()[name]


def test_bars_are_as_long_as_the_medians_of_the_results() -> None:
    results = json.loads((BENCHMARKS / "cpu-peers.json").read_text())
    drawn = ElementTree.fromstring(charts.charts()["peers-throughput.svg"])
    widths = [float(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect")]
    medians: list[float] = []
    most: list[float] = []
    for measure in (measure for measure in MEASURES if measure.more_is_better):
        runs = [
            [figures["workloads"].get(measure.workload, {}) for figures in results["servers"][name]["rounds"]]
            for name in results["servers"]
            if name in charts.BARS
        ]
        found = [[run[measure.key] for run in of_server if run] for of_server in runs]
        medians += [statistics.median(figures) for figures in found]
        most += [max(map(max, found))] * len(found)
    longest = charts.WIDTH - charts.LABEL_WIDTH - charts.FIGURES_WIDTH
    assert widths == pytest.approx(
        [longest * median / best for median, best in zip(medians, most, strict=True)], abs=0.06
    )


def test_a_range_goes_from_the_least_to_the_most_and_a_single_figure_has_none() -> None:
    drawn = charts.bars("title", [("head", {"oaiserve": [50.0, 100.0, 75.0], "llama-cpp": [25.0], "vllm-cpu": []})])
    lines = re.findall(r'd="M(\S+) (\S+) L(\S+) (\S+)" class="range"', drawn)
    longest = charts.WIDTH - charts.LABEL_WIDTH - charts.FIGURES_WIDTH
    left, right = charts.LABEL_WIDTH + longest / 2, charts.LABEL_WIDTH + longest
    assert [(float(a), float(b)) for a, y1, b, y2 in lines if y1 == y2] == [(left, right)]
    assert "75.0 (50.0..100)" in drawn
    assert ">25.0<" in drawn
    assert "vLLM" not in drawn
