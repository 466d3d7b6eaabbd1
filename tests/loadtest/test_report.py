"""The text, the HTML page and the comparison, which are all rendered from the dictionary of a report."""

import html
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
from loadtest.find_max import Bracket
from loadtest.html import GOOD, render_html
from loadtest.measure import parse_slos
from loadtest.plots import Bar, Series, lines, stacks
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


def test_the_first_line_says_what_was_read_again_in_all_runs() -> None:
    report = make()
    (point,) = report["points"]
    assert "read again" not in render(report)
    for run in point["runs"]:
        run["metrics"]["prompt_tokens"] = 2_000
        run["server"]["read_again"] = {"tokens": {"system": 1_000, "tools": 20}, "seconds": 2.25}
    line = "read again: 2,040 of 4,000 prompt tokens (51%), in 4.5 s (system 2,000, tools 40)"
    assert re.search(r"^== .*\n(.*)", render(report), re.MULTILINE)[1] == line  # type: ignore[index]


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


def page_of(report: Any, bracket: Bracket | None = None) -> str:
    """Return the page of a report, which must be well-formed and load nothing."""
    text = render_html(report, bracket)
    page = Page(text)
    assert page.open == []
    assert page.addresses == []
    assert "script" not in page.tags
    assert "pre" not in page.tags
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    return text


@pytest.mark.parametrize(("labels", "num_figures"), [(("1 users",), 5), (("<b> & users", "2 users"), 16)])
def test_the_html_page_has_figures_of_each_point_and_of_all(labels: tuple[str, ...], num_figures: int) -> None:
    text = page_of(make(labels=labels, slos={"ttft": 1.0}))
    assert text.count("<figure>") == num_figures
    assert text.count("Server and client: DISAGREE") == len(labels)
    assert text.count("<figcaption>Where the time goes") == len(labels)
    assert text.count("<figcaption>Phases by load") == (len(labels) > 1)
    assert "network + client 20.5 ms" in text


def test_the_html_page_begins_with_the_verdict() -> None:
    report = make()
    assert report["points"][0]["summary"]["slo_attainment"]["mean"] < GOOD
    text = page_of(report | {"slos": {"ttft": 1.0}})
    assert 'class="verdict suspect" aria-label="Verdict"><p class="large">90.9% good</p>' in text
    assert "<p>Share of the requests that kept ttft within 1 s.</p>" in text
    for run in report["points"][0]["runs"]:
        run["metrics"]["slo_attainment"] = {"all": 1.0}
        run["server"]["check"] = {"status": "agree", "reason": ""}
    assert 'class="verdict valid" aria-label="Verdict"><p class="large">Valid</p>' in page_of(report)
    report["points"][0]["verdict"] = "invalid"
    assert 'class="verdict invalid" aria-label="Verdict"><p class="large">Invalid</p>' in page_of(report)


def test_a_page_whose_client_and_server_disagree_does_not_say_that_the_figures_can_be_trusted() -> None:
    report = make()
    for run in report["points"][0]["runs"]:
        run["metrics"]["slo_attainment"] = {"all": 1.0}
        run["server"]["check"] = {"status": "disagree", "reason": "the server counted 9: does another client use it?"}
    text = page_of(report)
    assert 'class="verdict suspect" aria-label="Verdict"><p class="large">Server and client disagree</p>' in text
    assert "the server counted 9: does another client use it?</p>" in text
    assert "can be trusted" not in text


@pytest.mark.parametrize(
    ("token_share", "said"),
    [(0.234, "up to 23% of the tokens were another client's"), (None, "another client used the server")],
)
def test_verdict_of_a_shared_server_names_the_share_of_the_other_client(token_share: float | None, said: str) -> None:
    report = make()
    for run in report["points"][0]["runs"]:
        run["metrics"]["slo_attainment"] = {"all": 1.0}
        run["server"]["check"] = {"status": "disagree", "reason": "the server counted 12"}
        run["server"]["others"] = {"num_requests": 2, "token_share": token_share}
    text = page_of(report)
    assert 'class="verdict suspect" aria-label="Verdict"><p class="large">Another client used the server</p>' in text
    assert f"The client kept up, but {said}, so these are figures of a shared server." in html.unescape(text)
    assert "<h2>1 users: server shared, 2 runs</h2>" in text
    assert "== 1 users: server shared, 2 runs" in render(report)


def test_the_html_page_of_a_search_begins_with_the_rate() -> None:
    report = make(labels=("1 requests/s", "2 requests/s"), slos={"ttft": 1.0})
    text = page_of(report, Bracket(0.9, holds=1.0, fails=2.0))
    assert '<p class="large">1 requests/s</p>' in text
    assert "For 90% of the requests: ttft within 1 s. 1 requests/s holds, 2 does not." in text
    assert 'class="verdict suspect"' in page_of(report, Bracket(0.9, holds=1.0, problem="too late"))
    assert '<p class="large">No rate holds</p>' in page_of(report, Bracket(0.9, fails=1.0))


def test_a_report_without_any_answer_gives_a_well_formed_page() -> None:
    failed = [sample([], error="connect")]
    run = describe_run(failed, [ProcessHealth()], Arrivals(), None, {}, None)
    report = make_report("http", [make_point("x", Arrivals(), [run])], http={"url": "u"}, workload={"seed": 0})
    assert "ERROR connect, " in page_of(report)
    assert report["points"][0]["verdict"] == "invalid"


def test_a_plot_draws_its_points_in_proportion() -> None:
    svg = lines("t", "x", "y", [Series("a", "decode", [(0.0, 0.0), (5.0, 2.0), (10.0, 4.0)])])
    points = re.search(r'polyline class="curve" points="([^"]*)"', svg)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in points[1].split()]
    assert (x1 - x0, y0 - y1) == (pytest.approx(x2 - x1), pytest.approx(y1 - y2))
    assert x2 > x0
    assert y2 < y0  # pixels count downwards
    assert lines("t", "x", "y", [Series("a", "decode", [])]) == ""


def test_a_limit_above_all_points_is_in_the_plot() -> None:
    svg = lines("t", "x", "y", [Series("a", "decode", [(0.0, 1.0), (5.0, 2.0)])], limit=8)
    limit = re.search(r'class="limit" x1="\d+" x2="\d+" y1="([\d.]+)"', svg)
    highest = re.search(r'points=".* [\d.]+,([\d.]+)"', svg)
    assert limit is not None
    assert highest is not None
    assert 0 < float(limit[1]) < float(highest[1])


def test_the_parts_of_a_bar_are_stacked_from_the_bottom_up() -> None:
    parts = {"queue": ("queue", "queue"), "decode": ("decode", "decode")}
    svg = stacks("t", "x", "y", [Bar(0, 1, {"decode": 3.0, "queue": 1.0})], parts, ["1"])
    drawn = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" style="fill:var\(--(\w+)\)"><title>', svg)
    (y0, height0, first), (y1, height1, second) = drawn
    assert (first, second) == ("queue", "decode")
    assert float(y1) + float(height1) == pytest.approx(float(y0), abs=0.2)
    assert float(height1) == pytest.approx(3 * float(height0), abs=0.3)


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
