"""The garbage collector pauses while large JSON is decoded."""

import gc
from collections.abc import Iterator

import pytest

from oaiserve.engine.grammars.json_schema import prepare
from oaiserve.gc_pause import LARGE_BYTES, paused_for
from oaiserve.http.fair_turns import at_once
from oaiserve.routes.intake.body_types import ChatBody
from oaiserve.routes.intake.decode import parse

LISTS = "[" + "[]," * 30_000 + "[]]"
BY_DEFAULT = 700  # new objects after which the collector runs, with Python's own settings
NUMBER_BY_DEFAULT = 30_000 // BY_DEFAULT  # runs of the collector


@pytest.fixture
def runs() -> Iterator[list[str]]:
    """Return a list that gets an entry for each run of the collector from now on."""
    phases: list[str] = []

    def note(phase: str, _: object) -> None:
        if phase == "start":
            phases.append(phase)

    threshold = gc.get_threshold()
    gc.set_threshold(BY_DEFAULT)
    gc.callbacks.append(note)
    yield phases
    gc.callbacks.remove(note)
    gc.set_threshold(*threshold)


def test_a_pause_ends_also_after_an_error_and_small_json_has_none() -> None:
    with pytest.raises(ZeroDivisionError), paused_for(LARGE_BYTES):
        _ = 1 / int(gc.isenabled())
    assert gc.isenabled()
    with paused_for(LARGE_BYTES - 1):
        assert gc.isenabled()


def test_a_pause_within_another_leaves_its_end_to_the_first() -> None:
    with paused_for(LARGE_BYTES):
        with paused_for(LARGE_BYTES):
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_large_body_is_decoded_without_the_collector(runs: list[str]) -> None:
    at_once(parse(ChatBody, f'{{"model": "m", "messages": [], "chat_template_kwargs": {{"a": {LISTS}}}}}'.encode()))
    assert len(runs) < NUMBER_BY_DEFAULT / 4


def test_a_large_schema_is_decoded_without_the_collector(runs: list[str]) -> None:
    prepare.prepare(f'{{"examples": {LISTS}}}')
    assert len(runs) < NUMBER_BY_DEFAULT / 4
