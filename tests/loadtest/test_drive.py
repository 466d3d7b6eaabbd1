"""Calls are sent when they are due, on the clock of a world."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from loadtest.drive import Sending, send_in_loops, send_on_schedule
from loadtest.sample import Sample
from tests.world.loop import World


class Target:
    """A target that takes the same time for each call, but ends none before `least` are in flight, and counts them."""

    def __init__(self, world: World, seconds: float = 0.0, least: int = 0) -> None:
        self.sending = Sending(clock_ns=world.clock_ns)
        self.start_ns = world.now_ns
        self.in_flight = self.most_in_flight = 0
        self.called: list[str] = []
        self._world = world
        self._seconds = seconds
        self._least = least
        self._are_in_flight = asyncio.Event()

    async def run(self, call: str, intended_ns: int) -> list[Sample]:
        sample = Sample(0, intended_ns, sent_ns=self._world.now_ns)
        self.called.append(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self._least:
            self._are_in_flight.set()
        await self._are_in_flight.wait()
        await asyncio.sleep(self._seconds)
        self.in_flight -= 1
        sample.end_ns = self._world.now_ns
        return [sample]

    def sends(self, sending: Awaitable[None]) -> list[Sample]:
        """Return the samples of what is sent."""
        self._world.run_until_complete(sending)
        return self.sending.samples

    def seconds(self, at_ns: int) -> float:
        return (at_ns - self.start_ns) / 1e9


@pytest.fixture
def world() -> World:
    return World(0)


def test_an_open_loop_keeps_its_schedule_however_long_the_answers_take(world: World) -> None:
    target = Target(world, least=5)
    offsets = [0, 0.01, 0.02, 0.02, 0.05]
    samples = target.sends(send_on_schedule(target.sending, target.run, "abcde", offsets, target.start_ns))
    assert "".join(target.called) == "abcde"
    assert target.most_in_flight == 5
    assert sorted(target.seconds(sample.intended_ns) for sample in samples) == offsets
    assert sorted(target.seconds(sample.sent_ns) for sample in samples) == pytest.approx(offsets, abs=1e-6)
    assert (target.sending.progress.num_sent, target.sending.progress.num_ended) == (5, 5)


def test_the_delay_of_a_blocked_event_loop_counts_as_send_lag_and_latency(world: World) -> None:
    target = Target(world)
    world.call_later(0.005, world.pause, 0.1)  # blocks the event loop
    _, late = target.sends(send_on_schedule(target.sending, target.run, "ab", [0, 0.02], target.start_ns))
    assert late.send_lag_ns / 1e9 == pytest.approx(0.085, abs=1e-6)
    assert late.latency_ns / 1e9 == pytest.approx(0.085, abs=1e-6)


def in_loops(target: Target, calls: str, num_users: int, **limits: Any) -> list[Sample]:
    return target.sends(send_in_loops(target.sending, target.run, calls, num_users, target.start_ns, **limits))


def test_users_of_a_closed_loop_send_the_next_call_when_the_last_has_ended(world: World) -> None:
    target = Target(world, least=3)
    in_loops(target, "abcdefg", 3)
    assert sorted(target.called) == list("abcdefg")
    assert target.most_in_flight == 3


def test_a_closed_loop_sends_nothing_after_its_duration_and_a_ramp_spreads_the_starts(world: World) -> None:
    target = Target(world, 0.01)
    samples = in_loops(target, "x" * 1000, 2, duration_seconds=0.095, ramp_seconds=0.09)
    sent = [target.seconds(sample.sent_ns) for sample in samples]
    second_user = [0.045 + 0.01 * number for number in range(5)]  # It begins at half of the ramp.
    assert sorted(sent) == pytest.approx(sorted([0.01 * number for number in range(10)] + second_user), abs=1e-6)
