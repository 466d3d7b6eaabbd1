"""Sections that use one device start models together, and measure one at a time, in their order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event

import pytest

from tools.gpu.turns import Turns


class Visit:
    """A thread that enters a context, and stays in it until `leave`."""

    def __init__(self, pool: ThreadPoolExecutor, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.is_in = Event()
        self._may_leave = Event()
        self._context = context
        self._done = pool.submit(self._run)

    def _run(self) -> None:
        with self._context():
            self.is_in.set()
            assert self._may_leave.wait(30)

    def leave(self) -> None:
        self._may_leave.set()
        self._done.result(30)


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


def test_starts_go_together_and_end_before_a_measurement(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    first, second, third = (Turns(tmp_path, place) for place in range(3))
    starts = [Visit(pool, turns.starting) for turns in (first, second)]
    for start in starts:
        start.is_in.wait()
    measurement = Visit(pool, third.measuring)
    starts[0].leave()
    assert not measurement.is_in.wait(0.1)
    starts[1].leave()
    measurement.is_in.wait()
    late = Visit(pool, first.starting)
    assert not late.is_in.wait(0.1)
    measurement.leave()
    late.is_in.wait()
    late.leave()


def test_the_first_section_of_those_that_wait_measures_next(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    measuring = Visit(pool, Turns(tmp_path, 1).measuring)
    measuring.is_in.wait()
    last = Visit(pool, Turns(tmp_path, 2).measuring)
    while not (tmp_path / "waits-02").exists():
        pass
    first = Visit(pool, Turns(tmp_path, 0).measuring)
    while not (tmp_path / "waits-00").exists():
        pass
    assert not first.is_in.wait(0.1)
    measuring.leave()
    first.is_in.wait()
    assert not last.is_in.wait(0.1)
    first.leave()
    last.is_in.wait()
    last.leave()


def test_a_section_that_has_its_turn_may_start_models_and_measure_in_it(tmp_path: Path) -> None:
    turns = Turns(tmp_path, 0)
    with turns.measuring(), turns.starting(), turns.measuring():
        pass
    with turns.starting(), turns.measuring():
        pass


def test_who_dies_leaves_no_lock(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    for name in ("starts", "measures", "waits-00"):
        (tmp_path / name).touch()
    with Turns(tmp_path, 1).measuring():
        pass
