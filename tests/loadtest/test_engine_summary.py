"""The text of a run in process, from samples with known stamps: each line that such a benchmark must have."""

import re
from typing import Any

import pytest

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth
from loadtest.comparison import compare
from loadtest.experiment import describe_run, make_point, make_report
from loadtest.html import render_html
from loadtest.report import render
from tests.loadtest.samples import sample

ENGINE = {
    "model": "gpt2", "mode": "online", "device": "cuda:0", "dtype": "float16", "pretok": False, "tokenize_workers": 4,
    "stream_interval": 8, "paged_attention": "on", "cuda_graphs": "off: --no-cuda-graph", "nvtx": True,
    "submit_interval_ms": 20.0, "submit_schedule": "absolute",
}  # fmt: skip
PHASES_NS = {
    "receive": 0, "tokenize_wait": 1_000_000, "tokenize": 2_000_000, "queue": 30_000_000, "prefill": 40_000_000,
    "decode": 60_000_000,
}  # fmt: skip


def report(num_runs: int = 1, arrival: Any = "at-once", errors: int = 0, **engine: Any) -> Any:
    """Return the report of runs of 100 requests with 4 tokens each, submitted every millisecond."""
    runs = []
    for number in range(num_runs):
        samples = [
            sample(
                [80, 100, 120, 140 + number], at=i, lag=0.5, submit_ns=20_000 + 2000 * i, prompt_tokens=50,
                cached_tokens=10, phases_ns=PHASES_NS,
            )
            for i in range(100)
        ]  # fmt: skip
        samples += [sample([], error="Unavailable", error_message="no more", submit_ns=1) for _ in range(errors)]
        run = describe_run(samples, [ProcessHealth()], Arrivals(arrival="at-once"), None, {}, None, is_in_process=True)
        runs.append(run | {"submit_wall_seconds": 0.0235 + number / 1000})
    point = make_point("online, at-once", Arrivals(arrival=arrival), runs)
    return make_report("engine", [point], engine=ENGINE | engine, workload={"seed": 0}, slos={})


@pytest.mark.parametrize(
    "line",
    [
        "Model  gpt2",
        "Device  cuda:0, float16",
        "Pretok  off",
        "Tokenize workers  4",
        "Stream interval  8",
        "Paged attention  on",
        "CUDA graphs  off: --no-cuda-graph",
        "NVTX  on",
        "Requests  100, ok 100",
        "Prompt tokens  5,000, cached 1,000",
        "Completion tokens  400",
        "Submit wall  23.5 ms",
        "Submit interval  20 ms, absolute schedule",
        "Throughput  1,674 completion tokens/s",  # 400 tokens from the first submit's due time to the last end, 239 ms
        # mean, p50, p95, p99, max
        "Submit lag  0.500  0.500  0.500  0.500  0.500",
        "Submit latency  0.119  0.119  0.208  0.216  0.218",
        "Tokenize wait  1.000  1.000  1.000  1.000  1.000",
        "Tokenize  2.000  2.000  2.000  2.000  2.000",
        "Queue wait  30.0  30.0  30.0  30.0  30.0",
        "Prefill to first token  40.0  40.0  40.0  40.0  40.0",
        "TTFT  80.0  80.0  80.0  80.0  80.0",
        "TPOT  20.0  20.0  20.0  20.0  20.0",
        "ITL  20.0  20.0  20.0  20.0  20.0",
        "Latency  140.0  140.0  140.0  140.0  140.0",
    ],
)
def test_the_summary_has_the_line(line: str) -> None:
    lines = [re.sub(" {2,}", "  ", line) for line in render(report()).splitlines()]
    assert line in lines


def test_the_columns_of_times_are_named() -> None:
    assert re.search("^ms +mean +p50 +p95 +p99 +max ", render(report()), re.MULTILINE)


def test_figures_of_several_runs_are_means_with_intervals() -> None:
    text = render(report(num_runs=3))
    assert "== online, at-once: valid, 3 runs" in text
    assert re.search(r"^Requests +100 a run, ok 100$", text, re.MULTILINE)
    assert re.search(r"^Submit wall +24\.5 ms \(95 %: 22\.0 \.\. 27\.0\)$", text, re.MULTILINE)
    assert re.search(r"^Latency +141\.0 .* 138\.5 \.\. 143\.5 ", text, re.MULTILINE)
    assert re.search(r"^Throughput .* completion tokens/s \(95 %: ", text, re.MULTILINE)


def test_offline_answers_are_whole_and_other_arrivals_are_named() -> None:
    text = render(report(mode="offline", arrival="trace", submit_interval_ms=0.0, pretok=True))
    assert re.search("^Stream interval +whole answers$", text, re.MULTILINE)
    assert re.search("^Submit interval +by --arrival trace$", text, re.MULTILINE)
    assert re.search("^Pretok +on$", text, re.MULTILINE)


def test_errors_are_in_the_summary() -> None:
    text = render(report(errors=2))
    assert "ERROR Unavailable, before_first_token: 2 (the first: no more)" in text
    assert re.search("^Requests +102, ok 100$", text, re.MULTILINE)


def test_the_page_shows_the_phases_of_the_engine_alone() -> None:
    page = render_html(report())
    assert "Load test of gpt2, the engine in process" in page
    assert "prefill 40 ms" in page
    assert "network" not in page


def test_a_comparison_names_the_options_that_differ_and_has_submits() -> None:
    text = compare(report(), report(tokenize_workers=0))
    assert "different: engine tokenize_workers is 4 in A, 0 in B" in text
    assert re.search(r"^submit p99, ms +0\.216 +0\.216 +1\.000", text, re.MULTILINE)
    assert re.search(r"^submit wall, ms +23\.5 +23\.5", text, re.MULTILINE)
    other = report()
    del other["target"]  # as in older reports, which are all of servers
    assert "DIFFERENT: target is http in A, engine in B" in compare(other, report())
