"""What takes long is shown, as a bar in a terminal and as lines in a log of complete lines."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

from oaiserve.checkpoints import progress
from oaiserve.checkpoints.progress import Doing, Elapsed, Progress, counted
from oaiserve.telemetry import logs

NAMES = ["a", "b", "c", "d"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    Progress._instances.clear()  # Other tests leave some, and a terminal would show the bar below theirs.
    yield
    progress.log.setLevel(logging.NOTSET)


@contextmanager
def log_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    for handler in handlers:  # `configure` would close these.
        root.removeHandler(handler)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "DRAW_SECONDS", 0.0)


def count() -> None:
    assert list(counted("Expanding weights", NAMES, lambda name: 250_000_000)) == NAMES


@pytest.mark.parametrize("level", [logging.INFO, logging.NOTSET])
def test_short_work_is_not_shown(capsys: pytest.CaptureFixture[str], level: int) -> None:
    progress.log.setLevel(level)
    count()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("at_once")
def test_lines_say_how_much_is_done_of_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    progress.log.setLevel(logging.INFO)
    count()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Expanding weights:  25%|")
    assert "250M/1.00G [00:00<" in lines[0]
    assert not any("\r" in line for line in lines)


@pytest.mark.usefixtures("at_once")
def test_a_terminal_has_a_bar_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    for _ in Progress(NAMES, desc="Packing weights"):
        pass
    assert "\rPacking weights: " in screen.getvalue()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().endswith("\r")
    assert screen.getvalue().split("\r")[-2].strip() == ""


@pytest.mark.usefixtures("at_once")
def test_an_output_that_is_neither_a_terminal_nor_a_log_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    count()
    assert capsys.readouterr().err == ""


def test_last_line_shows_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    progress.log.setLevel(logging.INFO)
    with Progress(desc="Packing weights", total=4) as bar:
        bar.update()
        monkeypatch.setattr(bar, "mininterval", 60.0)  # no further line is due
        bar.update(3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("|")[0] for line in lines] == ["Packing weights:  25%", "Packing weights: 100%"]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_log_line_leaves_no_bar_on_the_screen(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", seconds)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with log_restored():
        logs.configure("info", "short")
        with Progress(desc="Packing weights", total=4) as bar:
            bar.update()
            logging.getLogger("oaiserve").info("meanwhile")
        logging.getLogger("oaiserve").info("afterwards")
    shown = [line.rpartition("\r")[2] for line in screen.getvalue().split("\n")]
    assert [line[-10:].strip() for line in shown] == ["meanwhile", "afterwards", ""]
    assert ("Packing" in screen.getvalue()) == (seconds == 0.0)


def test_only_one_of_two_concurrent_tasks_is_shown(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with Elapsed("Compiling") as first, Elapsed("Compiling too") as second:
        first.show()
        second.show()
        assert (first.is_first, second.is_first) == (True, False)
    with Elapsed("Compiling again") as again:
        assert again.is_first
    assert "Compiling ... 00:00" in screen.getvalue()
    assert "too" not in screen.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_long_work_writes_a_line_after_two_seconds_and_then_fewer_and_fewer() -> None:
    clock = Clock()
    lines: list[str] = []
    doing = Doing("Loading small", lambda: "import of torch" if clock.now < 105 else "", lines.append, clock=clock)
    for _ in range(40):
        doing.look()
        clock.now += 0.5
    assert lines == [
        "Loading small: import of torch (2 s)",
        "Loading small: import of torch (4 s)",
        "Loading small (8 s)",
        "Loading small (16 s)",
    ]


@pytest.mark.usefixtures("at_once")
def test_long_work_has_a_bar_on_a_terminal_that_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setattr(progress, "LOOK_SECONDS", 3600.0)
    parts = iter(["first part", "second part", "third part"])
    with Doing("Loading small", lambda: next(parts), pytest.fail) as doing:
        doing.look()
        with Progress(desc="Packing weights", total=4) as other:
            other.update()
            doing.look()
            before = screen.getvalue()
        doing.look()
    assert "Loading small: first part ... 00:00" in before
    assert "second part" not in screen.getvalue()
    assert "Loading small: third part" in screen.getvalue()
    assert screen.getvalue().endswith("\r")


@pytest.mark.usefixtures("at_once")
def test_long_work_of_one_process_of_several_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    lines: list[str] = []
    doing = Doing("Loading small", lambda: "", lines.append, has_bar=False)
    doing.look()
    assert (lines, screen.getvalue()) == (["Loading small (0 s)"], "")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("level", "form"), [("info", "json"), ("info", "short"), ("warning", "console")])
def test_a_log_of_json_or_without_information_hides_them(
    capsys: pytest.CaptureFixture[str], level: str, form: Literal["json", "short", "console"]
) -> None:
    logs.configure(level, form)
    count()
    assert capsys.readouterr().err == ""


def test_transformers_makes_such_bars() -> None:
    from transformers.utils import logging as of_transformers

    progress.show_transformers_progress()
    try:
        assert isinstance(of_transformers.tqdm(NAMES), Progress)
    finally:
        of_transformers.set_tqdm_hook(None)
