"""The processes that send. Each has an event loop of its own; this side only waits, so it may print and scrape.

The monotonic clock is the same in all processes of a machine, so all start at one moment, and their samples fit
together.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from time import monotonic_ns
from types import TracebackType
from typing import Any

from loadtest.client_health import ProcessHealth, ProcessWatch
from loadtest.drive import Progress, Sending, send_in_loops, send_on_schedule
from loadtest.http_target import HttpOptions, HttpTarget
from loadtest.prompts import Call
from loadtest.sample import Sample

REPORT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """What is sent in one run; `share` is what one of several processes sends of it."""

    http: HttpOptions
    calls: list[Call]
    offsets: list[float] | None = None  # seconds; None: closed loop
    num_users: int = 1
    max_in_flight: int | None = None
    duration_seconds: float | None = None
    ramp_seconds: float = 0.0
    warmup: list[Call] = field(default_factory=list)
    must_fill: bool = False
    think_seconds: float = 0.0
    slow_read_seconds: float = 0.0
    ask_timings: bool = False

    def target(self) -> HttpTarget:
        return HttpTarget(
            self.http,
            must_fill=self.must_fill,
            think_seconds=self.think_seconds,
            slow_read_seconds=self.slow_read_seconds,
            ask_timings=self.ask_timings,
        )


Result = tuple[list[Sample], ProcessHealth]


async def run_share(
    job: Job, number: int, of: int, until_start: Callable[[], int], report: Callable[[Progress], None]
) -> Result:
    """Prepares everything, warms up, and sends when `until_start` has come back with the start (nanoseconds)."""
    target = job.target()
    try:
        if job.offsets is None:
            of = min(of, job.num_users)  # a process without a user sends nothing
        mine = range(number, len(job.calls), of) if number < of else range(0)
        prepared = [target.prepare(index, job.calls[index]) for index in mine]
        warmup = [target.prepare(-1, call) for call in job.warmup[number::of]] if mine else []
        num_users = len(range(number, job.num_users, of))
        start_ns = monotonic_ns()
        await send_in_loops(Sending(), target.run, warmup, max(1, min(len(warmup), 64)), start_ns)
        start_ns = until_start()
        watch, sending = ProcessWatch(), Sending()
        watch.start()
        reporter = asyncio.create_task(_report(sending, report))
        if job.offsets is None:
            await send_in_loops(
                sending, target.run, prepared, num_users, start_ns, job.duration_seconds, job.ramp_seconds
            )
        else:
            offsets = [job.offsets[index] for index in mine]
            limit = None if job.max_in_flight is None else max(1, job.max_in_flight // of)
            await send_on_schedule(sending, target.run, prepared, offsets, start_ns, limit)
        health = watch.stop()
        health.num_connections = target.num_connections
        reporter.cancel()
        return sending.samples, health
    finally:
        await target.close()


async def _report(sending: Sending, report: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        report(sending.progress)


def _work(pipe: Connection, number: int, of: int) -> None:
    """One process: jobs in; progress and results out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one

    def until_start() -> int:
        pipe.send("ready")
        start_ns: int = pipe.recv()
        return start_ns

    while (job := pipe.recv()) is not None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                pipe.send(runner.run(run_share(job, number, of, until_start, pipe.send)))
            except Exception as error:  # the parent raises it; it may be of any kind
                pipe.send(error)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class Workers:
    """A pool of processes, for one run after the other."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes = []
        for number in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, number, num_processes), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, job: Job, before_start: Callable[[], None], on_progress: Callable[[Progress], None]
    ) -> tuple[list[Sample], list[ProcessHealth]]:
        """Sends all calls of the job. `before_start` runs when all are ready and warmed up. Samples in order of
        sending."""
        for pipe in self._pipes:
            pipe.send(job)
        for pipe in self._pipes:
            self._receive(pipe)
        before_start()
        start_ns = monotonic_ns() + 20_000_000  # when all have got this message
        for pipe in self._pipes:
            pipe.send(start_ns)
        progress = {id(pipe): Progress() for pipe in self._pipes}
        results: dict[int, Result] = {}
        while len(results) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if id(pipe) not in results]):
                message = self._receive(pipe)
                if isinstance(message, Progress):
                    progress[id(pipe)] = message
                    on_progress(sum(progress.values(), Progress()))
                else:
                    results[id(pipe)] = message
        samples = [sample for result in results.values() for sample in result[0]]
        return sorted(samples, key=lambda sample: sample.intended_ns), [health for _, health in results.values()]

    def _receive(self, pipe: Any) -> Any:
        try:
            message = pipe.recv()
        except EOFError:
            raise RuntimeError("A process of the load test has died.") from None
        if isinstance(message, Exception):
            raise message
        return message

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive() and kind is None:
                pipe.send(None)
            else:
                process.terminate()
            process.join(5)
