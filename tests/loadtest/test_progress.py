"""The progress of a run, on a terminal and in a log."""

import sys

import pytest

from loadtest.drive import Progress
from loadtest.progress import BAR_CHARACTERS, LOG_SECONDS, ProgressLine, bar

HALF = Progress(num_sent=40, num_ended=36, num_failed=1, num_missed=3)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that the line sees, which the test sets."""
    now = [100.0]
    monkeypatch.setattr("loadtest.progress.monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_a_bar_with_the_time_left(
    now: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    line = ProgressLine()
    line.show("trial 1, 2 requests/s", Progress(), 72)
    now[0] += 18
    line.show("trial 1, 2 requests/s", HALF, 72)
    half = "#" * (BAR_CHARACTERS // 2) + "." * (BAR_CHARACTERS // 2)
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown[-1] == f"trial 1, 2 requests/s [{half}] 36/72, 4 in flight, 2 missed, 1 failed, 18 s left"


def test_a_long_time_left_is_in_minutes(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    line.show("1 user", Progress(), 72)
    now[0] += 3135
    line.show("1 user", HALF, 72)
    assert capsys.readouterr().err.endswith("1 failed, 52.2 min left\n")


def test_a_line_that_is_too_long_for_the_terminal_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    ProgressLine().show("trial 1, 2 requests/s", HALF, 72)
    assert len(capsys.readouterr().err.removeprefix("\r\x1b[K")) == 29


def test_a_log_gets_a_line_now_and_then(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    for _ in range(3):
        now[0] += LOG_SECONDS / 2
        line.show("1 user", HALF, 36)
    assert capsys.readouterr().err == "1 user: 36/36, 4 in flight, 2 missed, 1 failed\n"


def test_a_bar_is_never_more_than_full() -> None:
    assert bar(2.0) == bar(1.0) == "[" + "#" * BAR_CHARACTERS + "]"
