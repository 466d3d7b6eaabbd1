"""`Recorder` passes records from the event loop to the consumers."""

import logging
from collections import Counter
from threading import current_thread
from typing import Any

import pytest

from oaiserve.facts.record import RequestRecord
from oaiserve.runtime import THREADS
from oaiserve.telemetry.recorder import BATCH_SECONDS, YIELD_MAX_QUEUED, YIELD_NS, Recorder
from tests.world.loop import World
from tests.world.schedules import schedules


class Recording:
    """A recorder in a world, and what has reached its consumer: the ids of records, and when, in ms of the world."""

    def __init__(self, world: World, takes_seconds: float = 0.0, **options: Any) -> None:
        self.world = world
        self.began = world.now
        self.takes_seconds = takes_seconds
        self.seen: list[str] = []
        self.at_ms: list[float] = []
        self.errors: list[str] = []
        consumers = options.pop("consumers", {}) | {"one": self._see}
        self.recorder = Recorder(consumers, self.errors.append, runtime=world, **options)

    @property
    def now_ms(self) -> float:
        return round((self.world.now + self.world.ahead - self.began) * 1e3, 3)

    def _see(self, record: RequestRecord) -> None:
        self.seen.append(record.request_id)
        self.at_ms.append(self.now_ms)
        self.world.sleep(self.takes_seconds)


def fail(record: RequestRecord) -> None:
    raise RuntimeError(f"cannot digest {record.request_id}")


def test_records_are_passed_on_by_a_thread_of_their_own(make_record) -> None:
    """The thread is a real one."""
    threads = []
    recorder = Recorder({"name": lambda _: threads.append(current_thread().name)}, [].append, runtime=THREADS)
    recorder.record(make_record())
    recorder.wait_for_queued(60)
    assert threads == ["telemetry"]
    assert recorder.close(60)


@schedules(50)
def test_each_consumer_sees_each_record_in_order(world: World, make_record) -> None:
    other = []
    recording = Recording(world, consumers={"other": lambda record: other.append(record.request_id)})
    names = [str(number) for number in range(10)]
    for name in names:
        world.call_later(world.random.random() / 10, recording.recorder.record, make_record(request_id=name))
    world.run_until(most_seconds=1.0)
    assert recording.recorder.close(60)
    assert recording.seen == other
    assert sorted(other) == names
    recording.recorder.record(make_record(request_id="late"))  # it is dropped
    world.run_until()
    assert (len(other), recording.errors) == (10, ["queue"])


@schedules(400)
def test_each_record_reaches_each_consumer_once_or_is_counted_as_lost_whenever_the_recorder_closes(
    world: World, make_record
) -> None:
    draw = world.random
    other = []
    recording = Recording(
        world,
        takes_seconds=draw.choice([0.0, 0.001, 0.05]),
        consumers={"bad": fail, "other": lambda record: other.append(record.request_id)},
        max_queued=draw.choice([1, 3, 100]),
        batch_seconds=draw.choice([0.0, BATCH_SECONDS]),
        tick_seconds=0.05,
    )
    for number in range(30):
        world.call_later(draw.random() / 2, recording.recorder.record, make_record(request_id=str(number)))
    world.run_until(most_seconds=draw.random())
    has_closed = recording.recorder.close(draw.choice([0.0, 0.01, 60.0]))
    assert has_closed == (not recording.recorder._worker.is_alive)
    world.run_until()
    assert recording.seen == other
    assert len({*other}) == len(other)
    errors = Counter(recording.errors)
    assert len(other) == errors["bad"]
    assert len(other) + errors["queue"] == 30


@schedules(20)
def test_a_consumer_that_raises_is_counted_and_does_not_stop_the_others(world: World, make_record) -> None:
    recording = Recording(world, consumers={"bad": fail})
    recording.recorder.record(make_record())
    recording.recorder.record(make_record())
    assert recording.recorder.close(60)
    assert (len(recording.seen), recording.errors) == (2, ["bad", "bad"])


@schedules(5)
def test_failures_are_logged_once_a_minute(world: World, make_record, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    caplog.clear()
    recording = Recording(world, consumers={"bad": fail})
    for number, seconds in enumerate((0.0, 1.0, 59.0, 61.0, 62.0)):
        world.call_later(seconds, recording.recorder.record, make_record(request_id=f"req-{number}"))
    world.run_until(most_seconds=63.0)
    assert recording.errors == ["bad"] * 5
    assert ["req-0" in line or "req-3" in line for line in caplog.messages] == [True, True]


@schedules(50)
def test_queued_records_can_be_waited_for(world: World, make_record) -> None:
    recording = Recording(world)
    recording.recorder.record(make_record(request_id="r"))
    recording.recorder.wait_for_queued(60)
    assert recording.seen == ["r"]
    recording.recorder.wait_for_queued(60)  # though there are none
    assert world.now - recording.began < 2.0
    assert recording.recorder.close(60)
    recording.recorder.wait_for_queued(0.001)  # Nobody passes it on any more.


@schedules(20, is_late=False)
def test_close_returns_false_if_the_timeout_was_too_short(world: World, make_record) -> None:
    recording = Recording(world, takes_seconds=10.0)
    recording.recorder.record(make_record())
    world.run_until(lambda: bool(recording.seen))
    assert not recording.recorder.close(9.0)
    assert recording.recorder.close(60)


@schedules(20, is_late=False)
def test_records_beyond_the_bound_are_dropped_and_counted(world: World, make_record) -> None:
    recording = Recording(world, takes_seconds=1.0, max_queued=2)
    recording.recorder.record(make_record())
    world.run_until(lambda: bool(recording.seen))  # the consumer has the first record, and the queue is empty
    for _ in range(3):
        recording.recorder.record(make_record())
    assert recording.errors == ["queue"]
    assert recording.recorder.close(60)
    assert len(recording.seen) == 3


@schedules(20)
def test_a_batch_of_records_causes_one_tick(world: World, make_record) -> None:
    num_seen: list[int] = []  # at each tick
    recording = Recording(world, tick=lambda: num_seen.append(len(recording.seen)))
    for _ in range(64):
        recording.recorder.record(make_record())
    world.run_until(lambda: bool(num_seen))
    assert num_seen == [64]
    recording.recorder.record(make_record())
    assert recording.recorder.close(60)
    assert num_seen == [64, 65]


@schedules(20, is_late=False)
def test_the_first_record_waits_for_others_for_batch_seconds_at_most(world: World, make_record) -> None:
    recording = Recording(world)
    for seconds in (0.0, 0.01, 0.02):
        world.call_later(seconds, recording.recorder.record, make_record())
    world.run_until(most_seconds=0.5)
    batch_ms = BATCH_SECONDS * 1e3
    rest_ms = YIELD_NS / 1e6
    assert recording.at_ms == pytest.approx([batch_ms, batch_ms + rest_ms, batch_ms + 2 * rest_ms], abs=0.01)


@schedules(20, is_late=False)
def test_the_end_of_the_recorder_ends_the_wait_for_others_and_the_rests(world: World, make_record) -> None:
    recording = Recording(world, batch_seconds=60)
    for _ in range(3):
        recording.recorder.record(make_record())
    world.run_until(most_seconds=0.02)
    assert recording.seen == []
    assert recording.recorder.close(60)
    assert recording.at_ms == pytest.approx([20.0] * 3, abs=0.01)


@schedules(20, is_late=False)
def test_nothing_wakes_the_worker_between_the_records_of_a_batch(world: World, make_record) -> None:
    """Other threads would wait for it."""
    turns = []
    recording = Recording(world)
    turn = recording.recorder._turn
    recording.recorder._worker._turn = lambda: (turns.append(recording.now_ms), turn())[1]
    for number in range(20):
        world.call_later(number / 1e3, recording.recorder.record, make_record())
    world.run_until(most_seconds=0.029)
    assert len(turns) <= 2
    world.run_until(lambda: len(recording.seen) == 20)
    assert len(turns) <= 22


@schedules(5, is_late=False)
def test_a_long_queue_is_passed_on_without_rests(world: World, make_record) -> None:
    recording = Recording(world)
    record = make_record()
    for _ in range(YIELD_MAX_QUEUED + 100):
        recording.recorder.record(record)
    world.run_until(lambda: len(recording.seen) == YIELD_MAX_QUEUED + 100)
    gaps = [after - before for before, after in zip(recording.at_ms, recording.at_ms[1:], strict=False)]
    assert max(gaps[:99]) < YIELD_NS / 1e6 / 2
    assert min(gaps[101:]) > YIELD_NS / 1e6 / 2


@schedules(20, is_late=False)
def test_ticks_happen_without_records(world: World) -> None:
    ticks: list[float] = []
    recording = Recording(world, tick=lambda: ticks.append(recording.now_ms), tick_seconds=0.5)
    world.run_until(most_seconds=1.9)
    assert ticks == pytest.approx([500.0, 1000.0, 1500.0], abs=0.1)
    assert recording.recorder.close(60)


@schedules(20)
def test_a_tick_that_raises_is_counted_and_does_not_end_the_worker(world: World, make_record) -> None:
    def fail_to_tick() -> None:
        raise RuntimeError("no steps")

    recording = Recording(world, tick=fail_to_tick, tick_seconds=0.001)
    world.run_until(lambda: bool(recording.errors))
    recording.recorder.record(make_record())
    assert recording.recorder.close(60)
    assert len(recording.seen) == 1
    assert {*recording.errors} == {"tick"}
