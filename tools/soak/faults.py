"""Faults that a soak brings upon its server while clients use it: each lasts some seconds, and then all is well again.

The collector of traces goes away and comes back, the disk is full, the wall clock is set, file descriptors run short,
and the process is stopped. Requests may fail only while descriptors are short.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from tools.soak.server import SoakServer, started_server

FAKETIME_LIBRARIES = tuple(
    Path(f"/usr/lib/{machine}-linux-gnu/faketime/libfaketimeMT.so.1") for machine in ("x86_64", "aarch64")
)
CALM_SECONDS = 20.0  # before each fault
GRACE_SECONDS = 5.0  # after a fault, in which requests that it met may still fail
CLOCK_STEP = "+3600s"


class Collector:
    """An OpenTelemetry collector that takes everything and keeps nothing. It can go away and come back."""

    def __init__(self) -> None:
        self.num_exports = 0
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.begin()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def begin(self) -> None:
        """Listen, always on the same port."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                collector.num_exports += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def end(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@dataclass(frozen=True)
class Fault:
    """A fault, and whether requests may fail while it lasts."""

    name: str
    seconds: float
    happening: Callable[[], AbstractContextManager[None]]
    may_fail_requests: bool = False


@dataclass
class Faults:
    """The faults of a soak, one after the other, and when they were there."""

    faults: Sequence[Fault]
    counts: dict[str, int] = field(default_factory=dict)
    is_under_way: bool = False
    _excused_until: float = 0.0  # on the monotonic clock

    def excuse(self, began: float) -> bool:
        """Return whether a request that began then and fails now may have met a fault in which requests may fail."""
        return began <= self._excused_until

    async def run(self) -> None:
        """Bring the faults about, in turn, until this task is cancelled. Then all is well again."""
        while True:
            for fault in self.faults:
                await asyncio.sleep(CALM_SECONDS)
                self.counts[fault.name] = self.counts.get(fault.name, 0) + 1
                self.is_under_way = True
                if fault.may_fail_requests:
                    self._excused_until = float("inf")
                try:
                    with fault.happening():
                        await asyncio.sleep(fault.seconds)
                finally:
                    self.is_under_way = False
                    if fault.may_fail_requests:
                        self._excused_until = time.monotonic() + GRACE_SECONDS


def faults_of(pid: int, collector: Collector, clock_file: Path | None) -> Faults:
    """Return the faults for the process `pid`. `clock_file` is what libfaketime reads, if it is used."""
    found = [
        Fault("the collector is gone", 30, lambda: without_collector(collector)),
        Fault("the disk is full", 15, lambda: with_limit(pid, resource.RLIMIT_FSIZE, 0)),
        Fault("the process is stopped (SIGSTOP)", 10, lambda: stopped(pid)),
        Fault(
            "file descriptors are short",
            15,
            lambda: with_limit(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd")) + 2),
            may_fail_requests=True,
        ),
    ]
    if clock_file is not None:
        found.append(Fault(f"the clock is set ({CLOCK_STEP}) and set back", 15, lambda: clock_set(clock_file)))
    return Faults(found)


@contextmanager
def started_with_faults(*more_flags: str) -> Iterator[tuple[SoakServer, Faults]]:
    """Start a server that exports its spans, and return it with its faults."""
    collector = Collector()
    with TemporaryDirectory() as folder:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRICS_EXPORTER": "none"}
        clock_file: Path | None = Path(folder) / "clock"
        if (fake_clock := faketime_environment(clock_file)) is None:
            clock_file = None
        try:
            with started_server(*more_flags, variables=variables | (fake_clock or {})) as server:
                assert server.process is not None
                yield server, faults_of(server.process.process.pid, collector, clock_file)
        finally:
            collector.end()


@contextmanager
def without_collector(collector: Collector) -> Iterator[None]:
    collector.end()
    try:
        yield
    finally:
        collector.begin()


@contextmanager
def with_limit(pid: int, limit: int, value: int) -> Iterator[None]:
    """Lower a soft limit of the process: writes that make a file longer than RLIMIT_FSIZE fail as on a full disk."""
    soft, hard = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, (soft, hard))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def clock_set(clock_file: Path) -> Iterator[None]:
    clock_file.write_text(CLOCK_STEP)
    try:
        yield
    finally:
        clock_file.write_text("+0s")


def faketime_environment(clock_file: Path) -> dict[str, str] | None:
    """Return the variables with which libfaketime sets the wall clock of a process, or None if it is not installed."""
    library = next((path for path in FAKETIME_LIBRARIES if path.exists()), None)
    if library is None:
        return None
    clock_file.write_text("+0s")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock_file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
    }
