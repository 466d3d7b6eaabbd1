"""Tests that the soak's clients are a function of its seed, that each check can fail, and that a short run passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from loadtest.metrics_page import parse_metrics
from tools.soak.__main__ import main
from tools.soak.run import LEAST_SECONDS_FOR_TRENDS, SoakRun, failures
from tools.soak.server import Sample
from tools.soak.turns import turns

PAGE = """# HELP oaiserve_requests_total Ended requests.
oaiserve_requests_total{{outcome="finished",error_type="{error_type}"}} {num_requests}
oaiserve_requests_running {running}
oaiserve_requests_waiting 0.0
oaiserve_tokenize_queue_depth {tokenizing}
oaiserve_kv_blocks{{state="used"}} {blocks}
oaiserve_kv_blocks{{state="free"}} 9.0
process_resident_memory_bytes {rss}
process_open_fds {fds}
oaiserve_spans_total{{result="ended"}} {spans}
oaiserve_spans_total{{result="exported"}} 3
oaiserve_spans_total{{result="dropped"}} 2
oaiserve_telemetry_errors_total{{consumer="log"}} {errors}
"""
QUIET = {"error_type": "", "num_requests": 5, "running": 0, "tokenizing": 0, "blocks": 0, "rss": 2**30, "fds": 16}
QUIET |= {"spans": 5, "errors": 0}
SECONDS = 3 * LEAST_SECONDS_FOR_TRENDS


def run(num_sent: int = 0, problems: tuple[str, ...] = (), rss_per_minute: int = 0, **at_the_end: Any) -> SoakRun:
    """Make the result of a soak that passes, except for what the arguments change."""

    def sample(second: float, **values: Any) -> Sample:
        rss = 2**30 + int(second / 60 * rss_per_minute)
        return Sample.of(second, parse_metrics(PAGE.format(**QUIET | {"rss": rss} | values)))

    samples = [sample(second) for second in range(int(SECONDS))]
    return SoakRun([*samples, sample(SECONDS, **at_the_end)], num_sent, problems=list(problems))


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("2 requests went wrong, the first one: no answer", {"problems": ("no answer", "no answer either")}),
        ("1 requests are still there", {"running": 1}),
        ("2 requests are still there", {"tokenizing": 2}),
        ("3 KV blocks are in use", {"blocks": 3}),
        ("reached a generation route, but oaiserve_requests_total grew by 4", {"num_sent": 5, "num_requests": 9}),
        ("reached a generation route, but oaiserve_requests_total grew by 6", {"num_sent": 5, "num_requests": 11}),
        ("17 file descriptors are open; before the clients came there were 16", {"fds": 17}),
        ("2 spans are neither exported nor counted as lost", {"spans": 7}),
        ("oaiserve_telemetry_errors_total grew by 1", {"errors": 1}),
        ("values that they had not had before: [('error_type', 'A new one')]", {"error_type": "A new one"}),
        ("memory grew by 3.00 MiB a minute; 2.00 is the limit", {"rss_per_minute": 3 * 2**20}),
    ],
)
def test_each_check_can_fail(message: str, wrong: dict[str, Any]) -> None:
    (sentence,) = failures(run(**wrong))
    assert message in sentence


def test_a_run_without_anything_wrong_passes() -> None:
    assert failures(run(num_sent=4, num_requests=9, rss_per_minute=2**20)) == []


def test_a_short_run_is_not_checked_for_trends() -> None:
    short = run(error_type="A new one", rss_per_minute=2**30)
    short.samples = [replace(sample, at_seconds=sample.at_seconds / 10) for sample in short.samples]
    assert failures(short) == []


def test_what_a_client_does_is_a_function_of_the_seed_and_its_number() -> None:
    lives = [list(islice(turns(seed, client), 200)) for seed, client in ((1, 1), (1, 1), (1, 2), (2, 1))]
    assert lives[0] == lives[1]
    assert lives[0] != lives[2] != lives[3] != lives[0]


def test_five_seconds_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = main(["--seed", "1", "--minutes", "0.08", "--clients", "8"])
    printed = capsys.readouterr()
    assert (exit_code, printed.err) == (0, ""), printed.out + printed.err
    assert "| requests that reached a generation route |" in printed.out
