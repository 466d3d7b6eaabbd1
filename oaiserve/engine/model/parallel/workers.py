"""The server's side of a tensor-parallel model. It starts the worker processes, watches them, and ends them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.messages import Arrived, Assignment, Logged, Ready, Work, WorkerFailed
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

WORKER = "oaiserve.engine.start.worker"  # the module that a worker process runs
EXPLAIN_SECONDS = 2.0  # how long to wait after an error for the end of a worker, which may be its cause
END_SECONDS = 10.0  # how long a worker may take to end before it is killed


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    connection: Connection[Any, Any]  # over the same socket, by another descriptor


class Workers:
    """The worker processes, which hold all shards of the model except for the first. `meet` starts them.

    When a worker ends by itself, `failure` has the reason, the other workers are ended too, and this process stops
    waiting for them. The failure is a StartupError until all are ready, and a RuntimeError afterwards.
    """

    def __init__(self, model: str | Path, options: EngineOptions) -> None:
        self._model, self._options = model, options
        self._workers: list[_Worker] = []
        self._watchers: list[Thread] = []
        self._folder: Path | None = None
        self._news: SimpleQueue[Arrived | Ready | None] = SimpleQueue()  # None: a worker has failed
        self._lock = Lock()  # protects the attributes below, which the watchers use
        self._is_ready = self._is_stopping = False
        self._on_failure: Callable[[Exception], None] | None = None
        self._before_leaving: list[Callable[[], object]] = []
        self.failure: Exception | None = None
        self._has_failed = Event()

    def meet(self, device: torch.device) -> None:
        """Start the workers, and join the group together with them. Raises StartupError if a worker ends."""
        self._folder = Path(tempfile.mkdtemp(prefix="oaiserve-"))
        for rank in range(1, self._options.tensor_parallel):
            self._start(Assignment(rank, self._folder, self._model, self._options))
        self._wait_for(Arrived)  # a worker that has got this far is unlikely to fail before it joins
        num_threads = self._options.cpu_threads or default_threads()
        group.join(0, self._options.tensor_parallel, device, self._folder, num_threads)

    def wait_until_ready(self) -> None:
        """Block until all workers have loaded their shards. Raises StartupError if a worker fails."""
        self._wait_for(Ready)
        with self._lock:
            self._is_ready = True

    def send(self, work: Work) -> None:
        """Send work to all workers. Raises the failure if a worker has ended."""
        self.check()
        message = ForkingPickler.dumps(work)
        with self.explained():
            for worker in self._workers:
                worker.connection.send_bytes(message)

    def check(self) -> None:
        """Raise the failure if a worker has failed."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the failure of a worker in place of its consequence in the `with` block."""
        try:
            yield
        except Exception as error:
            if error is not self.failure and self._workers and self._has_failed.wait(EXPLAIN_SECONDS):
                assert self.failure is not None
                raise self.failure from error
            raise

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Have `on_failure` called once with the failure, from any thread; at once if a worker has failed already."""
        with self._lock:
            self._on_failure, failure = on_failure, self.failure
        if failure is not None:
            on_failure(failure)

    def before_leaving(self, release: Callable[[], object]) -> None:
        """Have this called before the group is left: it releases graphs with collectives, see `group.leave`."""
        self._before_leaving.append(release)

    def stop(self) -> None:
        """End all workers, and wait until they have ended. It is safe to call this twice."""
        with self._lock:
            self._is_stopping = True
        for worker in self._workers:
            with suppress(OSError):  # the worker has ended already
                worker.socket.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            try:
                worker.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        for release in self._before_leaving:
            release()
        for watcher in self._watchers:
            watcher.join(END_SECONDS)
        for worker in self._workers:
            worker.connection.close()
            worker.socket.close()
        if self._workers:
            group.leave(broken=False)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a worker may have removed it already
        self._workers, self._watchers, self._before_leaving, self._folder = [], [], [], None

    def _start(self, assignment: Assignment) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # This does not use multiprocessing, which would import the program's main module again. The worker has a
            # session of its own, so that Ctrl-C reaches the server only.
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        worker = _Worker(assignment.rank, process, ours, Connection(os.dup(ours.fileno())))
        watcher = Thread(target=self._watch, args=(worker,), name=f"watch-worker-{assignment.rank}", daemon=True)
        self._workers.append(worker)
        self._watchers.append(watcher)
        watcher.start()
        with suppress(OSError):  # the watcher notices a worker that has ended already
            worker.connection.send(assignment)

    def _wait_for(self, kind: type[Arrived | Ready]) -> None:
        """Block until every worker has sent a message of this kind. Raises the failure if a worker has failed."""
        for _ in self._workers:
            news = self._news.get()
            self.check()
            assert isinstance(news, kind)

    def _watch(self, worker: _Worker) -> None:
        """Receive a worker's messages until it ends. Each worker has a thread that runs this."""
        failed: WorkerFailed | None = None
        try:
            while True:
                report = worker.connection.recv()
                match report:
                    case Logged():
                        log.log(report.level, "Worker %d: %s", worker.rank, report.text)
                    case WorkerFailed():
                        failed = report
                    case _:
                        self._news.put(report)
        except (EOFError, OSError):
            pass
        self._ended(worker, worker.process.wait(), failed)

    def _ended(self, worker: _Worker, code: int, report: WorkerFailed | None) -> None:
        with self._lock:
            if self._is_stopping or self.failure is not None:
                return
            reason = _reason(worker, code, report)
            failure = self.failure = RuntimeError(reason) if self._is_ready else StartupError(reason)
            on_failure = self._on_failure
        if report is not None and report.traceback is not None:
            log.error("Worker %d failed\n%s", worker.rank, report.traceback)
        self._has_failed.set()
        self._news.put(None)
        for other in self._workers:
            other.process.kill()  # it may be waiting for the worker that has ended
        if on_failure is not None:
            on_failure(failure)
        group.leave(broken=True)


def _reason(worker: _Worker, code: int, report: WorkerFailed | None) -> str:
    if report is None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"The process with part {worker.rank} of the model {how}."
    if report.traceback is None:
        return report.reason
    return f"The process with part {worker.rank} of the model failed ({report.reason})."
