"""Profiles of the next steps: their number of steps, their ends, and requests that do not notice them."""

from __future__ import annotations

from pathlib import Path

import pytest

from oaiserve.engine.request import Failed, Finished
from oaiserve.errors import Conflict, InternalError, NotFound, Unavailable
from oaiserve.facts.record import Profile
from tests.engine.doubles import (
    TIMEOUT_SECONDS,
    Clock,
    Inbox,
    ScriptedRunner,
    ShownRanges,
    device_is_gone,
    make_engine,
    request,
    wait_until_idle,
)

HOUR = 3600


class Recorded:
    """A recording that keeps the names of its ranges."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def save(self, path: Path) -> None:
        path.write_text("\n".join(self.names))


class FakeProfiler:
    def __init__(self, *, fails_to: str = "") -> None:
        self.fails_to = fails_to
        self.is_on = False
        self._ranges = ShownRanges()

    def start(self) -> ShownRanges:
        assert not self.is_on
        if self.fails_to == "start":
            raise RuntimeError("no profiler here")
        self.is_on, self._ranges = True, ShownRanges()
        return self._ranges

    def stop(self) -> Recorded:
        assert self.is_on
        assert not self._ranges.is_open
        self.is_on = False
        if self.fails_to == "stop":
            raise RuntimeError("lost")
        return Recorded(self._ranges.names)


def launches(profile: Profile) -> int:
    return sum(name.startswith("launch ") for name in profile.recording.names)


@pytest.mark.usefixtures("overlap")
def test_a_profile_has_the_requested_number_of_steps() -> None:
    profiler, inbox = FakeProfiler(), Inbox()
    runner = ScriptedRunner(gated=True)
    with make_engine(runner, profiler=profiler, tokenize_workers=0) as engine:
        for begins_first in (True, False):  # or between two steps
            if begins_first:
                asked = engine.profile(3, HOUR)
            engine.submit(request("r", max_tokens=20), inbox)
            runner.started.get(timeout=TIMEOUT_SECONDS)
            if not begins_first:
                asked = engine.profile(3, HOUR)
            runner.permit(20)
            profile = asked.result(TIMEOUT_SECONDS)
            assert (profile.num_steps, launches(profile)) == (3, 3)
            assert not profiler.is_on
            assert isinstance(inbox.wait_terminal("r")["r"], Finished)
            while not runner.started.empty():
                runner.started.get()


def test_a_second_profile_at_the_same_time_is_refused_and_any_without_a_profiler() -> None:
    with make_engine() as engine, pytest.raises(NotFound, match="no profiler"):
        engine.profile(1, HOUR).result(TIMEOUT_SECONDS)
    with make_engine(profiler=FakeProfiler(), tokenize_workers=0) as engine:
        first = engine.profile(1, HOUR)
        with pytest.raises(Conflict, match="being made already"):
            engine.profile(1, HOUR).result(TIMEOUT_SECONDS)
        list(engine.stream(request()))
        assert first.result(TIMEOUT_SECONDS).num_steps == 1


def test_an_idle_engine_ends_a_profile_when_its_time_is_over() -> None:
    with make_engine(profiler=FakeProfiler()) as engine:
        profile = engine.profile(5, 0.01).result(TIMEOUT_SECONDS)
    assert (profile.num_steps, launches(profile)) == (0, 0)
    assert profile.duration_ns >= 10_000_000


def test_a_busy_engine_ends_a_profile_between_two_steps() -> None:
    clock, inbox = Clock(), Inbox()
    runner = ScriptedRunner(gated=True)
    with make_engine(runner, profiler=FakeProfiler(), clock_ns=clock, tokenize_workers=0) as engine:
        asked = engine.profile(100, 1)
        engine.submit(request(max_tokens=9), inbox)
        runner.started.get(timeout=TIMEOUT_SECONDS)
        clock.move(0.5)
        runner.permit()
        runner.started.get(timeout=TIMEOUT_SECONDS)
        assert not asked.done()
        clock.move(0.5)
        runner.permit()
        profile = asked.result(TIMEOUT_SECONDS)
        runner.permit(100)
        inbox.wait_terminal("r")
    assert (profile.num_steps, profile.duration_ns) == (2, 10**9)


def test_only_the_caller_of_a_profile_can_end_it() -> None:
    profiler = FakeProfiler()
    with make_engine(profiler=profiler) as engine:
        first, second = engine.profile(5, HOUR), engine.profile(5, HOUR)
        engine.end_profile(second)
        list(engine.stream(request(max_tokens=2)))
        assert profiler.is_on
        engine.end_profile(first)
        assert first.result(TIMEOUT_SECONDS).num_steps == 2
        assert isinstance(second.exception(TIMEOUT_SECONDS), Conflict)
        engine.end_profile(first)  # again
        assert engine.profile(1, 0.001).result(TIMEOUT_SECONDS).num_steps == 0


def test_a_profile_that_is_cancelled_before_it_begins_does_not_begin() -> None:
    engine = make_engine(profiler=FakeProfiler())
    asked = engine.profile(1, HOUR)
    assert asked.cancel()
    with engine:
        wait_until_idle(engine)
        assert engine.profile(1, 0.001).result(TIMEOUT_SECONDS).num_steps == 0


@pytest.mark.parametrize("fails_to", ["start", "stop"])
def test_if_a_profiler_fails_no_request_does(fails_to: str, caplog: pytest.LogCaptureFixture) -> None:
    with make_engine(profiler=FakeProfiler(fails_to=fails_to), tokenize_workers=0) as engine:
        asked = engine.profile(2, HOUR)
        assert isinstance(list(engine.stream(request(max_tokens=5)))[-1], Finished)
        with pytest.raises(
            InternalError, match=f"The profiler {'does not start' if fails_to == 'start' else 'has failed'}"
        ):
            asked.result(TIMEOUT_SECONDS)
        assert engine.failure is None
    assert [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_engine_ends_its_profile(fails: bool) -> None:
    profiler, runner = FakeProfiler(), ScriptedRunner(computing=device_is_gone if fails else lambda _: None)
    with make_engine(runner, profiler=profiler, tokenize_workers=0) as engine:
        asked = engine.profile(3, HOUR)
        wait_until_idle(engine)
        if fails:
            assert isinstance(list(engine.stream(request()))[-1], Failed)
    late = engine.profile(1, HOUR)
    for future in (asked, late):
        assert isinstance(future.exception(TIMEOUT_SECONDS), InternalError if fails else Unavailable)
    assert not profiler.is_on


def test_ranges_of_another_profiler_pause_during_a_profile() -> None:
    """The other profiler is attached all the time."""
    others = ShownRanges()
    with make_engine(ranges=others, profiler=FakeProfiler(), tokenize_workers=0) as engine:
        asked = engine.profile(2, HOUR)
        list(engine.stream(request(max_tokens=6)))
        assert launches(asked.result(TIMEOUT_SECONDS)) == 2
    assert sum(name.startswith("launch ") for name in others.names) == 4
