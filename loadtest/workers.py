"""The processes that send requests. Each has its own event loop; the main process only waits, prints and scrapes.

The monotonic clock is the same in all processes of a machine, so they start at the same moment and their samples can be
merged.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from time import monotonic_ns
from types import TracebackType
from typing import Any

import uvloop

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth, ProcessWatch
from loadtest.drive import Progress, Sending, send_in_loops, send_on_schedule
from loadtest.http_target import HttpOptions, HttpTarget
from loadtest.measure import Slos
from loadtest.prompts import Call, Workload
from loadtest.sample import Sample

# Takes a function that ends the sending early, and returns a context within which it may be called.
Stopping = Callable[[Callable[[], None]], AbstractContextManager[object]]

REPORT_SECONDS = 0.5
STOP = "stop"


@dataclass(frozen=True, slots=True)
class Job:
    """All requests of one run, and how they are sent. Each process sends its share (`run_share`)."""

    http: HttpOptions
    workload: Workload
    arrivals: Arrivals
    calls: list[Call]
    offsets: list[float] | None = None  # send times in seconds after the start; None: closed loop
    warmup: list[Call] = field(default_factory=list)
    ask_timings: bool = False
    slos: Slos = field(default_factory=dict)


Result = tuple[list[Sample], ProcessHealth]


async def run_share(
    job: Job,
    number: int,
    of: int,
    until_start: Callable[[], int],
    report: Callable[[Progress], None],
    stopping: Stopping = nullcontext,
) -> Result:
    """Send one process's share of a job. It prepares the requests, warms up, and then starts at the time (nanoseconds)
    that `until_start` returns. `of` is the number of processes. `stopping` may end the sending early; requests without
    a whole answer then count as abandoned."""
    target = HttpTarget(job.http, job.workload, ask_timings=job.ask_timings)
    arrivals = job.arrivals
    try:
        if job.offsets is None:
            of = min(of, arrivals.concurrency)  # a process without a user would send nothing
        mine = range(number, len(job.calls), of) if number < of else range(0)
        prepared = [target.prepare(index, job.calls[index]) for index in mine]
        warmup = [target.prepare(-1, call) for call in job.warmup[number::of]] if mine else []
        num_users = len(range(number, arrivals.concurrency, of))
        start_ns = monotonic_ns()
        await send_in_loops(Sending(), target.run, warmup, max(1, min(len(warmup), 64)), start_ns)
        start_ns = until_start()
        watch = ProcessWatch()
        sending = Sending(limits=job.slos)
        watch.start()
        reporter = asyncio.create_task(_report(sending, report))
        if job.offsets is None:
            duration = arrivals.duration_seconds
            ramp = arrivals.ramp_seconds
            sent = send_in_loops(sending, target.run, prepared, num_users, start_ns, duration, ramp)
        else:
            offsets = [job.offsets[index] for index in mine]
            sent = send_on_schedule(sending, target.run, prepared, offsets, start_ns)
        await _until_stopped(sent, target, stopping)
        health = watch.stop()
        health.num_connections = target.num_connections
        reporter.cancel()
        return sending.samples, health
    finally:
        await target.close()


async def _until_stopped(sent: Coroutine[Any, Any, None], target: HttpTarget, stopping: Stopping) -> None:
    task = asyncio.create_task(sent)

    def stop() -> None:
        target.is_stopped = True
        task.cancel()

    with stopping(stop):
        try:
            await task
        except asyncio.CancelledError:
            if not target.is_stopped:
                raise


async def _report(sending: Sending, report: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        report(sending.progress)


def _work(pipe: Connection, number: int, of: int) -> None:
    """Run jobs from the pipe in this process, and send progress and results back."""

    def until_start() -> int:
        pipe.send("ready")
        start_ns: int = pipe.recv()
        return start_ns

    @contextmanager
    def stopping(stop: Callable[[], None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def on_readable() -> None:  # STOP, or the parent has died. The loop below reads it.
            loop.remove_reader(pipe.fileno())
            stop()

        loop.add_reader(pipe.fileno(), on_readable)
        try:
            yield
        finally:
            loop.remove_reader(pipe.fileno())
            os.set_blocking(pipe.fileno(), True)  # uvloop had made it non-blocking

    while (job := pipe.recv()) is not None:
        if job == STOP:  # STOP ended the last run, or arrived after it had ended.
            continue
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                pipe.send(runner.run(run_share(job, number, of, until_start, pipe.send, stopping)))
            except Exception as error:  # the parent raises it again
                pipe.send(error)


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Start processes that never get Ctrl-C: the parent handles it and ends them. They inherit the mask, so Ctrl-C
    prints no traceback while they are imported."""
    resource_tracker.ensure_running()  # It unblocks SIGINT after starting its process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """A pool of processes that send one job after the other."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._running: list[Any] = []  # the pipes to which `stop` sends
        self._processes = []
        for number in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, number, num_processes), daemon=True)
            with _blocked_interrupts():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, job: Job, before_start: Callable[[], None], on_progress: Callable[[Progress], None]
    ) -> tuple[list[Sample], list[ProcessHealth]]:
        """Send all calls of the job, and return the samples in the order of their intended sends, and each process's
        health. `before_start` is called when all processes are ready and warmed up."""
        for pipe in self._pipes:
            pipe.send(job)
        for pipe in self._pipes:
            self._receive(pipe)
        before_start()
        start_ns = monotonic_ns() + 20_000_000  # late enough that every process has received it
        for pipe in self._pipes:
            pipe.send(start_ns)
        self._running = list(self._pipes)
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

    def stop(self) -> None:
        """End the run early. Call it from `on_progress`."""
        for pipe in self._running:
            pipe.send(STOP)
        self._running = []

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
