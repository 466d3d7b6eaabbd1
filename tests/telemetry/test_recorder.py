"""`Recorder` passes records from the event loop to the consumers."""

import logging
from threading import Event, Semaphore, current_thread

import pytest

from oaiserve.facts.record import RequestRecord
from oaiserve.telemetry.recorder import Recorder
from tests.waiting import wait_until


def fail(record: RequestRecord) -> None:
    raise RuntimeError(f"cannot digest {record.request_id}")


def test_each_consumer_sees_each_record_in_order_on_a_thread_of_their_own(make_record) -> None:
    first = []
    second = []
    threads = []
    consumers = {
        "first": first.append,
        "second": second.append,
        "name": lambda _: threads.append(current_thread().name),
    }
    recorder = Recorder(consumers, [].append)
    records = [make_record(request_id=str(i)) for i in range(10)]
    for record in records:
        recorder.record(record)
    assert recorder.close(60)
    assert first == second == records
    assert set(threads) == {"telemetry"}
    recorder.record(make_record())  # it is ignored
    assert first == records


def test_a_consumer_that_raises_is_counted_and_does_not_stop_the_others(make_record) -> None:
    seen = []
    errors = []
    recorder = Recorder({"bad": fail, "good": seen.append}, errors.append)
    recorder.record(make_record())
    recorder.record(make_record())
    assert recorder.close(60)
    assert (len(seen), errors) == (2, ["bad", "bad"])


def test_failures_are_logged_once_a_minute(make_record, caplog: pytest.LogCaptureFixture) -> None:
    now_seconds = iter([0, 1, 59, 60, 61])
    recorder = Recorder({"bad": fail}, [].append, clock_ns=lambda: next(now_seconds) * 10**9)
    for i in range(5):
        recorder.record(make_record(request_id=f"req-{i}"))
    with caplog.at_level(logging.ERROR):
        assert recorder.close(60)
    assert ["req-0" in line or "req-3" in line for line in caplog.messages] == [True, True]


def test_queued_records_can_be_waited_for(make_record) -> None:
    seen = []
    recorder = Recorder({"seen": seen.append}, [].append, batch_seconds=0.001)
    recorder.record(make_record(request_id="r"))
    recorder.wait_for_queued(60)
    assert [record.request_id for record in seen] == ["r"]
    assert recorder.close(60)
    recorder.wait_for_queued(0)  # Nothing sets its event any more.


def test_close_returns_false_if_the_timeout_was_too_short(make_record) -> None:
    release = Event()
    recorder = Recorder({"slow": lambda record: release.wait(60)}, [].append)
    recorder.record(make_record())
    assert not recorder.close(0)
    release.set()
    assert recorder.close(60)


def test_records_beyond_the_bound_are_dropped_and_counted(make_record) -> None:
    release = Event()
    taken = Event()
    errors = []
    recorder = Recorder({"slow": lambda record: (taken.set(), release.wait(60))}, errors.append, max_queued=2)
    recorder.record(make_record())
    assert taken.wait(60)  # the consumer has the first record, and the queue is empty
    for _ in range(3):
        recorder.record(make_record())
    release.set()
    assert errors == ["queue"]


def test_a_batch_of_records_causes_one_tick(make_record) -> None:
    calls: list[str] = []
    recorder = Recorder(
        {"one": lambda record: calls.append("record")},
        [].append,
        lambda: calls.append("tick"),
        batch_seconds=60,  # the end of the recorder ends the wait
    )
    for _ in range(64):
        recorder.record(make_record())
    assert recorder.close(60)
    assert [call for call in calls if call == "record"] == ["record"] * 64
    assert calls[calls.index("record") :] == ["record"] * 64 + ["tick"]


def test_the_first_record_waits_for_others_for_batch_seconds_at_most(make_record) -> None:
    seen = Event()
    recorder = Recorder({"one": lambda record: seen.set()}, [].append, batch_seconds=60)
    recorder.record(make_record())
    assert not seen.wait(0.02)
    assert recorder.close(60)
    recorder = Recorder({"one": lambda record: seen.set()}, [].append, batch_seconds=0.001)
    seen.clear()
    recorder.record(make_record())
    assert seen.wait(60)


def test_ticks_happen_without_records() -> None:
    ticks = Semaphore(0)
    recorder = Recorder({}, [].append, ticks.release, tick_seconds=0.001)
    assert ticks.acquire(timeout=60)
    assert ticks.acquire(timeout=60)
    assert recorder.close(60)


def test_a_tick_that_raises_is_counted_and_does_not_end_the_thread(make_record) -> None:
    def fail_to_tick() -> None:
        raise RuntimeError("no steps")

    errors = []
    seen = []
    recorder = Recorder({"one": seen.append}, errors.append, fail_to_tick, tick_seconds=0.001)
    wait_until(lambda: bool(errors))
    recorder.record(make_record())
    assert recorder.close(60)  # else it would fail, and log that, in a minute, while another test runs
    assert len(seen) == 1
    assert set(errors) == {"tick"}
