"""The text, the HTML page and the comparison, which are all rendered from the dictionary of a report."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth
from loadtest.comparison import compare, load_report
from loadtest.experiment import describe_run, make_point, make_report
from loadtest.html import plot, render_html
from loadtest.measure import parse_slos
from loadtest.report import render
from oaiserve.errors import StartupError
from tests.loadtest.samples import sample

PHASES_NS = {"queue": 10_000_000, "prefill": 70_000_000, "decode": 40_000_000}


GAUGES = {
    "num_reads": 2, "num_failed": 1, "mean_seconds": 0.002, "max_seconds": 0.003, "cpu_seconds": 0.001,
    "series": [
        {"at": 1.0, "running": 4.0, "waiting": 0.0, "kv_cache_usage": 0.25},
        {"at": 2.0, "running": 3.0, "waiting": 1.0, "kv_cache_usage": None},
    ],
}  # fmt: skip


def make(*, ttft_ms: float = 100, labels: tuple[str, ...] = ("1 users",), num_runs: int = 2, **settings: Any) -> Any:
    points = []
    for label in labels:
        runs = []
        for run in range(num_runs):
            ttft = ttft_ms + run
            samples = [sample([ttft, ttft + 20, ttft + 40], at=50 * i, phases_ns=dict(PHASES_NS)) for i in range(10)]
            samples.append(sample([], error="http_503", error_message="full"))
            health = ProcessHealth(wall_ns=10**9, cpu_ns=10**7, loop_lag_ns=[10**5])
            runs.append(describe_run(samples, [health], Arrivals(), None, parse_slos("ttft:1s"), None))
            runs[-1]["server"] = {
                "dialect": "oaiserve",
                "means": {"queue": 0.01, "ttft": 0.08},
                "rest": {"first_token": None, "last_token": None},
                "check": {"status": "disagree", "reason": "the clock"},
                "gauges": GAUGES,
            }
        points.append(make_point(label, Arrivals(), runs))
    return make_report("http", points, http={"url": "http://test"}, workload={"seed": 0}, **settings)


class Page(HTMLParser):
    """A parser that keeps the tags and addresses of a page, and fails if a tag is closed in the wrong order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_interval_of_a_share_ends_at_1() -> None:
    runs = []
    for num_failed in (0, 1):
        samples = [sample([100, 120]) for _ in range(9)] + [sample([], error="http_503")] * num_failed
        runs.append(describe_run(samples, [ProcessHealth()], Arrivals(), None, parse_slos("ttft:1s"), None))
    share = make_point("1 user", Arrivals(), runs)["summary"]["slo_attainment"]
    assert share["low"] < share["mean"] == pytest.approx(0.95)
    assert share["high"] == 1


def test_a_report_survives_json_and_has_its_environment() -> None:
    report = make()
    again = json.loads(json.dumps(report))
    assert again["schema"] == "oaiserve-loadtest/1"
    assert again["environment"]["cpus"]
    assert render(again) == render(report)


def test_the_text_has_the_figures_the_clients_health_and_the_errors() -> None:
    text = render(make())
    assert re.search(r"^TTFT +100\.5 +100\.5 ", text, re.MULTILINE)
    assert re.search(r"^TPOT +20\.0 ", text, re.MULTILINE)
    assert "ERROR http_503, before_first_token: 2 (the first: full)" in text
    assert "gauges: read 2 times by a process that sends nothing" in text
    assert "max 3.000 ms; 1 reads failed" in text
    assert "Load test of None at http://test" in text
    assert re.search(r"^with Python [\d.]+, .*httpx [\d.]+, httpcore [\d.]+", text, re.MULTILINE)
    assert "SLO attainment" in text
    assert "client: valid" in text
    assert "server and client: DISAGREE (the clock)" in text
    assert re.search(r"^prefill +70\.0", text, re.MULTILINE)


def test_intervals_are_over_the_repeats() -> None:
    entry = make()["points"][0]["summary"]["ttft_p50"]
    assert entry["values"] == [pytest.approx(0.100), pytest.approx(0.101)]
    assert entry["low"] < 0.1005 < entry["high"]
    single = make(num_runs=1)["points"][0]["summary"]
    assert single["ttft_p50"]["low"] is None


def test_the_arguments_in_a_report_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["x", "run", "--api-key", "s3cret", "--header=a: s3cret", "--header", "b: s3cret", "--url", "http://test"]
    monkeypatch.setattr("sys.argv", argv)
    report = make()
    assert "s3cret" not in json.dumps(report)
    assert report["arguments"][-2:] == ["--url", "http://test"]


@pytest.mark.parametrize("labels", [("1 users",), ("<b> & users", "2 users")])
def test_the_html_page_is_well_formed_and_loads_nothing(labels: tuple[str, ...]) -> None:
    text = render_html(make(labels=labels))
    page = Page(text)
    assert page.open == []
    assert page.addresses == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == {1: 5, 2: 7}[len(labels)]
    assert text.count("server and client: DISAGREE") == len(labels)
    assert text.count("Where the time goes: ") == 2 * len(labels)  # in the caption and in the label for screen readers
    assert "network + client 20.5 ms" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "prefers-color-scheme: dark" in text


def test_a_report_without_any_answer_gives_a_well_formed_page() -> None:
    failed = [sample([], error="connect")]
    run = describe_run(failed, [ProcessHealth()], Arrivals(), None, {}, None)
    report = make_report("http", [make_point("x", Arrivals(), [run])], http={"url": "u"})
    assert Page(render_html(report)).open == []
    assert report["points"][0]["verdict"] == "invalid"


def test_a_plot_draws_its_points_in_proportion() -> None:
    svg = plot("t", "x", "y", [("a", [(0.0, 0.0), (5.0, 2.0), (10.0, 4.0)])])
    points = re.search(r'polyline points="([^"]*)"', svg)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in points[1].split()]
    assert (x1 - x0, y0 - y1) == (pytest.approx(x2 - x1), pytest.approx(y1 - y2))
    assert x2 > x0
    assert y2 < y0  # pixels count downwards
    assert plot("t", "x", "y", [("a", [])]) == ""


def test_a_comparison_has_ratios_intervals_and_different_settings() -> None:
    text = compare(make(num_runs=3), make(num_runs=3, ttft_ms=200, slos={"ttft": 1.0}))
    row = re.search(r"^ttft p50, ms +101\.0 +201\.0 +1\.990 +([\d.]+) \.\. ([\d.]+) \*$", text, re.MULTILINE)
    assert row is not None
    assert float(row[1]) < 1.99 < float(row[2])
    assert "slos" in text
    assert "Without repeats" in compare(make(num_runs=1), make(num_runs=1))


def test_files_that_are_not_reports_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, sentence in (("{", "is not JSON"), ("{}", "has the schema None"), ("[]", "has the schema None")):
        path.write_text(content)
        with pytest.raises(StartupError, match=sentence):
            load_report(path)
    with pytest.raises(StartupError, match="cannot be read"):
        load_report(tmp_path / "none.json")
    path.write_text(json.dumps(make()))
    assert load_report(path)["workload"] == {"seed": 0}
