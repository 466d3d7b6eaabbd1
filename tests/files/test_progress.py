"""What takes long is shown, as a bar in a terminal and in lines elsewhere."""

import io
import logging
import sys
from collections.abc import Iterator
from typing import Literal

import pytest

from oaiserve.files import progress
from oaiserve.files.progress import Progress, counted
from oaiserve.telemetry import logs

NAMES = ["a", "b", "c", "d"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    Progress._instances.clear()  # of other tests, below which a terminal would have the bar
    yield
    progress.log.setLevel(logging.NOTSET)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)


def count() -> None:
    assert list(counted("Expanding weights", NAMES, lambda name: 250_000_000)) == NAMES


def test_what_is_over_at_once_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    count()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("at_once")
def test_lines_say_how_much_is_done_of_how_much(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert screen.getvalue().rpartition("\r")[2].strip() == ""


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("level", "form"), [("info", "json"), ("warning", "console")])
def test_a_log_of_json_or_without_information_hides_them(
    capsys: pytest.CaptureFixture[str], level: str, form: Literal["json", "console"]
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
