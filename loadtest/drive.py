"""Send the calls of one process when they are due. The target is only a function that runs one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, field
from operator import add
from time import monotonic_ns
from typing import TypeVar

from loadtest.measure import Slos, is_good
from loadtest.sample import Sample

CallT = TypeVar("CallT")
RunCall = Callable[[CallT, int], Awaitable[list[Sample]]]  # takes a call and its intended send time (ns)


@dataclass(slots=True)
class Progress:
    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_missed: int = 0  # requests that failed or missed a limit

    def __add__(self, other: Progress) -> Progress:
        return Progress(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class Sending:
    """The samples and the progress of one process so far."""

    samples: list[Sample] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    limits: Slos = field(default_factory=dict)  # limits of a good request
    clock_ns: Callable[[], int] = monotonic_ns

    async def run(self, run_call: RunCall[CallT], call: CallT, intended_ns: int) -> None:
        self.progress.num_sent += 1
        samples = await run_call(call, intended_ns)
        self.samples += samples
        self.progress.num_ended += 1
        self.progress.num_failed += any(sample.error is not None for sample in samples)
        self.progress.num_missed += sum(
            not is_good(sample, self.limits) for sample in samples if not sample.is_abandoned
        )


async def send_on_schedule(
    sending: Sending,
    run_call: RunCall[CallT],
    calls: Sequence[CallT],
    offsets: Sequence[float],
    start_ns: int,
) -> None:
    """Send each call at `start_ns` plus its offset (seconds), however long the answers take: an open loop."""
    async with asyncio.TaskGroup() as tasks:
        for call, offset in zip(calls, offsets, strict=True):
            due_ns = start_ns + int(offset * 1e9)
            while (wait_ns := due_ns - sending.clock_ns()) > 0:  # noqa: ASYNC110 - a timer may fire early
                await asyncio.sleep(wait_ns / 1e9)
            tasks.create_task(sending.run(run_call, call, due_ns))


async def send_in_loops(
    sending: Sending,
    run_call: RunCall[CallT],
    calls: Sequence[CallT],
    num_users: int,
    start_ns: int,
    duration_seconds: float | None = None,
    ramp_seconds: float = 0.0,
) -> None:
    """Let each user send the next call as soon as the previous one has ended: a closed loop."""
    rest = iter(calls)
    stop_ns = start_ns + int(duration_seconds * 1e9) if duration_seconds is not None else None

    async def user(number: int) -> None:
        joins_ns = start_ns + int(ramp_seconds * number / num_users * 1e9)
        await asyncio.sleep((joins_ns - sending.clock_ns()) / 1e9)
        while stop_ns is None or sending.clock_ns() < stop_ns:
            call = next(rest, None)
            if call is None:
                return
            await sending.run(run_call, call, sending.clock_ns())

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_users):
            tasks.create_task(user(number))
