"""Clients take turns, small and large work have workers of their own, and freed memory is given back."""

import os
import sys
import threading
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.http.fair_turns import LARGE_BYTES, LONG, MUCH_BYTES, Task, Turns, TurnWorkers
from oaiserve.runtime import NICENESS, THREADS
from tests.world.loop import World
from tests.world.schedules import schedules


class Workers:
    """Workers in a world, and how work has ended: when, and with what."""

    def __init__(self, world: World, num_threads: int = 1, **options: Any) -> None:
        self.world = world
        self.workers = TurnWorkers(num_threads, "test", runtime=world, **options)
        self.ended: dict[str, tuple[float, object]] = {}

    def add(self, name: str, work: Generator[bool | None, None, object], num_bytes: int = 0, **more: Any) -> None:
        def ends(result: object = "dropped") -> None:
            self.ended[name] = (round(self.world.now + self.world.ahead - began, 3), result)

        began = self.world.now
        client = more.pop("client", "")
        is_unwanted = more.pop("is_unwanted", bool)
        self.workers.add(
            Task(
                client,
                num_bytes,
                work,
                done=ends,
                failed=ends,
                dropped=ends,
                is_unwanted=is_unwanted,
                name=name,
                **more,
            )
        )

    def takes(self, *seconds: float, kind: bool | None = None) -> Generator[bool | None, None, str]:
        """Work in pieces that take so long. Before each piece it yields the kind."""
        for each in seconds:
            yield kind
            self.world.sleep(each)
        return "done"


@schedules(20, is_late=False)
def test_small_work_does_not_wait_for_large_work_nor_large_for_small(world: World) -> None:
    for held_bytes, other_bytes in ((LARGE_BYTES + 1, LARGE_BYTES), (LARGE_BYTES, LARGE_BYTES + 1)):
        workers = Workers(world)
        workers.add("held", workers.takes(60.0), held_bytes)
        workers.add("other", workers.takes(0.001), other_bytes)
        world.run_until()
        assert workers.ended == {"held": (60.0, "done"), "other": (0.001, "done")}


@schedules(50, is_late=False)
def test_pieces_that_take_long_keep_no_other_work_waiting_and_take_turns(world: World) -> None:
    workers = Workers(world, 2, has_long=True)
    workers.add("a", workers.takes(10.0, 10.0, kind=LONG), client="a")
    for number in range(3):
        workers.add(f"other {number}", workers.takes(0.001), LARGE_BYTES * number)
    workers.add("large a", workers.takes(10.0, 10.0, kind=LONG), LARGE_BYTES + 1, client="a")
    is_unwanted = []
    workers.add("b", workers.takes(10.0, 10.0, kind=LONG), client="b", is_unwanted=lambda: bool(is_unwanted))
    world.run_until(most_seconds=5.0)
    assert sorted(workers.ended) == ["other 0", "other 1", "other 2"]
    assert all(seconds < 0.01 for seconds, _ in workers.ended.values())
    is_unwanted.append(True)
    world.run_until()
    assert workers.ended["b"][1] == "dropped"
    assert {name: workers.ended[name] for name in ("a", "large a")} in (
        {"a": (20.0, "done"), "large a": (40.0, "done")},
        {"a": (40.0, "done"), "large a": (20.0, "done")},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, threads have no niceness of their own")
def test_pieces_that_take_long_yield_the_cores_to_the_model() -> None:
    """The threads are real ones: niceness is the system's."""

    def work() -> Generator[bool | None, None, None]:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        yield LONG
        found.append(min(before + NICENESS, 19) - os.getpriority(os.PRIO_PROCESS, 0))
        has_ended.set()

    found: list[int] = []
    has_ended = threading.Event()
    workers = TurnWorkers(1, "test", has_long=True, runtime=THREADS)
    workers.add(Task("", 0, work(), lambda _: None, lambda _: None, lambda: None, bool, "test"))
    assert has_ended.wait(60)
    workers.stop()
    assert found == [0]


@schedules(20, is_late=False)
def test_only_the_worker_for_large_work_rests_in_proportion_to_its_cpu_time(world: World) -> None:
    def busy_seconds(num_bytes: int, **rest: float) -> float:
        """Return when the second of two pieces of work ends, each of which takes 10 ms."""
        workers = Workers(world)
        for name in ("first", "second"):
            workers.add(name, workers.takes(0.01), num_bytes, **rest)
        world.run_until()
        return workers.ended["second"][0]

    assert busy_seconds(0, rest=2.0) == 0.02
    assert busy_seconds(LARGE_BYTES + 1) == 0.02
    assert busy_seconds(LARGE_BYTES + 1, rest=2.0) == 0.04


@schedules(5)
def test_memory_for_a_large_body_is_taken_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("oaiserve.http.fair_turns.take", taken.append)
    workers = Workers(world)
    for num_bytes in (MUCH_BYTES - 1, MUCH_BYTES):
        workers.add(str(num_bytes), workers.takes(0.001, 0.001, 0.001), num_bytes)
    world.run_until()
    assert len(workers.ended) == 2
    assert taken == [MUCH_BYTES]


@schedules(20, is_late=False)
def test_freed_memory_is_given_back_once_after_the_last_of_some_large_bodies(world: World) -> None:
    def give_back() -> None:
        returned.append(round(world.now - began, 3))

    returned: list[float] = []
    began = world.now
    workers = Workers(world, give_back=give_back, give_back_seconds=1.0)
    for name in "abc":
        workers.add(name, workers.takes(0.5), MUCH_BYTES)
    world.run_until(most_seconds=10.0)
    assert returned == [2.5]
    workers.add("small", workers.takes(0.5), MUCH_BYTES - 1)
    world.run_until(most_seconds=10.0)
    assert returned == [2.5]
    began = world.now
    workers.workers.give_back_later()
    world.run_until(most_seconds=10.0)
    assert returned == [2.5, 1.0]


@schedules(200)
def test_each_task_has_one_end_whenever_the_workers_stop(world: World) -> None:
    draw = world.random
    workers = Workers(world, 2, has_long=True)
    calls: list[str] = []
    for number in range(12):
        name = f"{number}"
        work = workers.takes(*(draw.random() for _ in range(draw.randint(0, 3))), kind=draw.choice([None, LONG]))
        num_bytes = draw.choice([0, LARGE_BYTES + 1, MUCH_BYTES])
        is_unwanted = draw.choice([False, False, True])
        ends = {end: lambda *_, name=name: calls.append(name) for end in ("done", "failed", "dropped")}
        task = Task(
            draw.choice("ab"), num_bytes, work, **ends, is_unwanted=lambda no=is_unwanted: no, name=name, rest=3.0
        )
        world.call_later(3 * draw.random(), workers.workers.add, task)
    world.run_until(most_seconds=4 * draw.random())
    workers.workers.stop()
    world.run_until()
    assert sorted(calls) == sorted(map(str, range(12)))
    assert workers.workers.num_waiting == 0


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
