"""Clients take turns, small and large work have threads of their own, and freed memory is given back."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.http.fair_turns import LARGE_BYTES, LONG, LONG_NICENESS, MUCH_BYTES, Task, Turns, TurnWorkers
from tests.engine.doubles import Clock

TIMEOUT_SECONDS = 60


@contextmanager
def running(num_threads: int = 1, **options: Any) -> Iterator[TurnWorkers]:
    workers = TurnWorkers(num_threads, "test", **options)
    try:
        yield workers
    finally:
        workers.stop()


def add(
    workers: TurnWorkers, call: Callable[[], object], *, num_bytes: int = 0, rest: float = 0
) -> SimpleQueue[object]:
    """Add work of one piece. Return where its result will be."""
    ends: SimpleQueue[object] = SimpleQueue()

    def work() -> Generator[None, None, object]:
        yield from ()
        return call()

    ended = {"done": ends.put, "failed": ends.put, "dropped": lambda: None}
    workers.add(Task("", num_bytes, work(), **ended, is_unwanted=bool, name="test", rest=rest))
    return ends


def test_small_work_does_not_wait_for_large_work_nor_large_for_small() -> None:
    for held_bytes, other_bytes in ((LARGE_BYTES + 1, LARGE_BYTES), (LARGE_BYTES, LARGE_BYTES + 1)):
        go = threading.Event()
        with running() as workers:
            held = add(workers, lambda go=go: go.wait(TIMEOUT_SECONDS), num_bytes=held_bytes)
            other = add(workers, lambda: "other", num_bytes=other_bytes)
            assert other.get(timeout=TIMEOUT_SECONDS) == "other"
            assert held.empty()
            go.set()
            assert held.get(timeout=TIMEOUT_SECONDS) is True


def test_pieces_that_take_long_keep_no_other_work_waiting_and_take_turns() -> None:
    go = threading.Event()
    order = list[str]()
    ends = SimpleQueue[object]()

    def in_two_long_pieces(client: str) -> Generator[bool | None, None, str]:
        for number in range(2):
            yield LONG
            go.wait(TIMEOUT_SECONDS)
            order.append(f"{client}{number}")
        yield None
        return threading.current_thread().name

    def add_long(client: str, num_bytes: int = 0, is_unwanted: Callable[[], bool] = bool) -> None:
        ended = {"done": ends.put, "failed": ends.put, "dropped": lambda: ends.put(f"{client} dropped")}
        workers.add(Task(client, num_bytes, in_two_long_pieces(client), **ended, is_unwanted=is_unwanted, name="test"))

    with running(2, has_long=True) as workers:
        add_long("a")
        others = [add(workers, lambda: "other", num_bytes=LARGE_BYTES * number) for number in range(3)]
        add_long("a", LARGE_BYTES + 1)
        add_long("b", is_unwanted=order.__len__)
        assert [end.get(timeout=TIMEOUT_SECONDS) for end in others] == ["other"] * 3
        assert order == []
        go.set()
        result = {ends.get(timeout=TIMEOUT_SECONDS) for _ in range(3)}
    assert order[0] == "a0"
    assert order.count("a0") == order.count("a1") == 2
    assert {"b dropped", "test-large"} < result
    assert all(str(each).startswith(("test-", "b")) and "long" not in str(each) for each in result)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, threads have no niceness of their own")
def test_pieces_that_take_long_yield_the_cores_to_the_model() -> None:
    ends = SimpleQueue[int]()

    def work() -> Generator[bool | None, None, int]:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        yield LONG
        return min(before + LONG_NICENESS, 19) - os.getpriority(os.PRIO_PROCESS, 0)

    with running(has_long=True) as workers:
        workers.add(Task("", 0, work(), ends.put, ends.put, lambda: None, bool, "test"))
        assert ends.get(timeout=TIMEOUT_SECONDS) == 0


def test_only_the_thread_for_large_work_rests_in_proportion_to_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: SimpleQueue[tuple[str, float]] = SimpleQueue()
    monkeypatch.setattr(
        "oaiserve.http.fair_turns.time.sleep", lambda seconds: rests.put((threading.current_thread().name, seconds))
    )
    cpu_ns = 0
    monkeypatch.setattr("oaiserve.http.fair_turns.thread_time_ns", lambda: cpu_ns)

    def work() -> str:
        nonlocal cpu_ns
        cpu_ns += 10_000_000
        return "rests"

    with running() as workers:
        add(workers, lambda: "small", rest=2.0).get(timeout=TIMEOUT_SECONDS)
        add(workers, lambda: "large", num_bytes=LARGE_BYTES + 1).get(timeout=TIMEOUT_SECONDS)
        add(workers, work, num_bytes=LARGE_BYTES + 1, rest=2.0).get(timeout=TIMEOUT_SECONDS)
        assert rests.get(timeout=TIMEOUT_SECONDS) == ("test-large", 0.02)
    assert rests.empty()


def test_memory_for_a_large_body_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("oaiserve.http.fair_turns.take", taken.append)
    ends: SimpleQueue[object] = SimpleQueue()

    def work() -> Generator[None, None, str]:
        for _ in range(3):
            yield
        return "done"

    with running() as workers:
        for num_bytes in (MUCH_BYTES - 1, MUCH_BYTES):
            workers.add(Task("", num_bytes, work(), ends.put, ends.put, lambda: None, bool, "test"))
            assert ends.get(timeout=TIMEOUT_SECONDS) == "done"
    assert taken == [MUCH_BYTES]


def test_freed_memory_is_given_back_once_after_the_last_of_some_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("oaiserve.http.fair_turns.monotonic_ns", clock)
    returned: SimpleQueue[int] = SimpleQueue()
    with running(give_back=lambda: returned.put(1), give_back_seconds=0.01) as workers:
        ends = [add(workers, lambda: "a", num_bytes=MUCH_BYTES) for _ in range(3)]
        assert [end.get(timeout=TIMEOUT_SECONDS) for end in ends] == ["a"] * 3
        assert returned.empty()
        clock.move(1)
        returned.get(timeout=TIMEOUT_SECONDS)
        add(workers, lambda: "a").get(timeout=TIMEOUT_SECONDS)
        assert returned.empty()
        workers.give_back_later()
        clock.move(1)
        returned.get(timeout=TIMEOUT_SECONDS)
    with running(give_back=lambda: returned.put(1), give_back_seconds=0) as workers:
        for _ in range(3):  # whatever is due is given back before the next work
            add(workers, lambda: "a", num_bytes=MUCH_BYTES - 1).get(timeout=TIMEOUT_SECONDS)
    assert returned.empty()


CLIENTS = st.sampled_from("abcd")
actions = st.lists(
    st.one_of(st.tuples(st.just("add"), CLIENTS), st.just(("take", "")), st.tuples(st.just("put back"), CLIENTS)),
    max_size=80,
)


@given(actions)
def test_between_two_turns_of_a_client_each_other_one_that_waited_gets_one(done: list[tuple[str, str]]) -> None:
    turns: Turns[tuple[str, int]] = Turns()
    waiting: dict[str, list[int]] = {client: [] for client in "abcd"}
    owed: dict[str, set[str]] = {client: set() for client in "abcd"}  # the clients that must come before it
    for number, (action, client) in enumerate(done):
        if action == "add":
            turns.add(client, (client, number))
            waiting[client].append(number)
        elif action == "put back":
            turns.put_back(client, (client, number))
            waiting[client].insert(0, number)
        elif turns:
            taken, item = turns.take()
            assert item == waiting[taken].pop(0)
            assert not owed[taken]
            for others in owed.values():
                others.discard(taken)
            owed[taken] = {other for other in waiting if other != taken and waiting[other]}
    assert bool(turns) == any(waiting.values())
    left = []
    while turns:
        left.append(turns.take())
    assert sorted(left) == sorted((client, item) for client, items in waiting.items() for item in items)
