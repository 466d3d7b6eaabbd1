"""The real runtime: workers are threads, which wait between two turns and have a priority."""

import os
import subprocess
import sys

import pytest

from oaiserve.runtime import AT_ONCE, ENDED, THREADS, Empty, Priority, Worker


class Taker:
    """A worker that takes items up to one that is None, and keeps them."""

    def __init__(self, priority: Priority = Priority.NORMAL) -> None:
        self.taken: list[str] = []
        self.policy = -1
        self.worker: Worker[str | None] = THREADS.worker("test", self._turn, priority=priority)

    def _turn(self) -> int | None:
        try:
            item = self.worker.take()
        except Empty:
            return None
        if item is None:
            self.policy = os.sched_getscheduler(0) if sys.platform == "linux" else -1
            return ENDED
        self.taken.append(item)
        return AT_ONCE


def test_items_are_taken_in_their_order_and_after_the_end_by_anybody() -> None:
    taker = Taker()
    taker.worker.post("before the start")
    taker.worker.start()
    for item in ("a", "b", None, "c"):
        taker.worker.post(item)
    assert taker.worker.join()
    assert taker.taken == ["before the start", "a", "b"]
    assert taker.worker.take() == "c"
    with pytest.raises(Empty):
        taker.worker.take()


def test_an_error_of_the_begin_is_raised_by_the_start() -> None:
    def fails() -> None:
        raise RuntimeError("the device is gone")

    worker: Worker[None] = THREADS.worker("test", lambda: None, fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        worker.start()
    assert worker.join()
    assert not worker.is_alive


def test_a_worker_that_was_never_started_has_nothing_to_wait_for() -> None:
    assert Taker().worker.join()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, threads have no priority of their own")
def test_an_idle_worker_has_the_cores_that_nobody_needs() -> None:
    taker = Taker(Priority.IDLE)
    taker.worker.post(None)
    taker.worker.start()
    taker.worker.join()
    assert taker.policy == os.SCHED_IDLE


def test_a_worker_takes_its_turns_without_the_right_to_set_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is not root may lower the priority of a thread, but not raise it. A sandbox may forbid both."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.sched_setscheduler", refuse, raising=False)
    monkeypatch.setattr("os.nice", refuse)
    for priority in (Priority.LOW, Priority.IDLE):
        taker = Taker(priority)
        taker.worker.post("item")
        taker.worker.post(None)
        taker.worker.start()
        taker.worker.join()
        assert taker.taken == ["item"]


def test_a_later_call_comes_at_the_end_of_the_process_at_the_latest() -> None:
    script = "from oaiserve.runtime import THREADS; THREADS.later('test', 3600.0, lambda: print('called'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "called\n"
