import asyncio
import time
from time import monotonic_ns

from loadtest.drive import Sending, send_in_loops, send_on_schedule
from loadtest.sample import Sample


class Target:
    """A target that takes the same time for each call, but ends none before `least` are in flight, and counts them."""

    def __init__(self, seconds: float = 0.0, least: int = 0) -> None:
        self.seconds = seconds
        self.least = least
        self.are_in_flight = asyncio.Event()
        self.in_flight = self.most_in_flight = 0
        self.called: list[str] = []

    async def run(self, call: str, intended_ns: int) -> list[Sample]:
        sample = Sample(0, intended_ns, sent_ns=monotonic_ns())
        self.called.append(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self.least:
            self.are_in_flight.set()
        await self.are_in_flight.wait()
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1
        sample.end_ns = monotonic_ns()
        return [sample]


async def test_an_open_loop_keeps_its_schedule_however_long_the_answers_take() -> None:
    target = Target(least=5)
    sending = Sending()
    start_ns = monotonic_ns()
    await send_on_schedule(sending, target.run, "abcde", [0, 0.01, 0.02, 0.02, 0.05], start_ns)
    assert "".join(target.called) == "abcde"
    assert target.most_in_flight == 5
    offsets = [(sample.intended_ns - start_ns) / 1e9 for sample in sending.samples]
    assert sorted(offsets) == [0, 0.01, 0.02, 0.02, 0.05]
    assert all(sample.sent_ns >= sample.intended_ns for sample in sending.samples)
    assert (sending.progress.num_sent, sending.progress.num_ended) == (5, 5)


async def test_the_delay_of_a_blocked_event_loop_counts_as_send_lag_and_latency() -> None:
    target = Target()
    sending = Sending()
    start_ns = monotonic_ns()
    asyncio.get_running_loop().call_later(0.005, time.sleep, 0.1)  # blocks the event loop
    await send_on_schedule(sending, target.run, "ab", [0, 0.02], start_ns)
    lags = [sample.send_lag_ns / 1e9 for sample in sending.samples]
    assert lags[1] > 0.08
    assert sending.samples[1].latency_ns / 1e9 > 0.08


async def test_users_of_a_closed_loop_send_the_next_call_when_the_last_has_ended() -> None:
    target = Target(least=3)
    sending = Sending()
    await send_in_loops(sending, target.run, "abcdefg", 3, monotonic_ns())
    assert sorted(target.called) == list("abcdefg")
    assert target.most_in_flight == 3


async def test_a_closed_loop_sends_nothing_after_its_duration_and_a_ramp_spreads_the_starts() -> None:
    target = Target(0.01)
    sending = Sending()
    start_ns = monotonic_ns()
    calls = "x" * 1000  # at least ten seconds of them
    await send_in_loops(sending, target.run, calls, 2, start_ns, duration_seconds=0.1, ramp_seconds=0.08)
    assert len(sending.samples) <= 2 * 11
    sent_seconds = sorted((sample.sent_ns - start_ns) / 1e9 for sample in sending.samples)
    assert sum(sent < 0.04 for sent in sent_seconds) <= 4  # the second user begins at half of the ramp
