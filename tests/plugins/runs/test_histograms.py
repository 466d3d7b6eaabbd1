"""Ended runs are in the histograms of /metrics."""

import pytest

from oaiserve.plugins.runs import count_ended, kept_runs
from oaiserve.plugins.runs.kept_runs import KeptRuns
from oaiserve.runtime import THREADS
from tests.plugins.runs.records import turn_at


def test_a_run_that_has_ended_is_in_each_histogram_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_runs, "SILENCE_SECONDS", 0)
    kept = KeptRuns(THREADS.unix_ns, lambda: 0)
    kept.add(turn_at(0, 100, prompt_tokens=100))
    kept.add(turn_at(600, 700, turn={"after_tools": True}, prompt_tokens=300, cached_tokens=100))
    histograms: list[list[float]] = [[], [], []]
    for _ in range(2):
        count_ended(kept, *(values.append for values in histograms))
    assert histograms == [[2], [0.5], [0.25]]
