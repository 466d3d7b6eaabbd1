"""Checks many cases at once, in processes that each take one case after the other.

A case that crashes its process, or hangs, loses only its own result. `worker` is the other end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from typing import Any

from tools.gpu.sections import Target
from tools.gpu.worker import answer
from tools.gpu.workload import OFF

COMMAND = (sys.executable, "-m", "tools.gpu.worker")
START_SECONDS = 120.0  # until a process has imported torch and transformers
KILL_LIMIT_SECONDS = 10.0  # A process may live on after this, if the driver blocks its end.
# Each process computes with few threads, because there are as many processes as the machine has cores.
THREADS = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
LAST_LINES = 4
# Settings of starts beside others: all processes together may use this share of the device's memory.
TOGETHER = {"gpu_memory_utilization": 0.97}
NO_NUMBERS = "no numbers on the fake device"

Result = dict[str, Any]


def checked(
    cases: Sequence[str],
    check: str,
    target: Target,
    *,
    at_once: int,
    limit_seconds: float,
    command: Sequence[str] = COMMAND,
) -> Iterator[dict[str, Result]]:
    """Yield the result of each case by its name, as soon as it ends. The first cases begin first.

    `check` is module:function. The function takes the target and the name of a case, and returns the result, with
    `equal`. A case that did not get that far is not equal, and its `problem` is the reason. On the fake device, this
    process checks all of them.
    """
    if target.is_dry:  # the launches of this process are noted
        yield from ({case: answer(check, target, case)} for case in cases)
        return
    waiting: SimpleQueue[str] = SimpleQueue()
    for case in cases:
        waiting.put(case)
    found: SimpleQueue[dict[str, Result]] = SimpleQueue()

    def work() -> None:
        with suppress(Empty):
            case = waiting.get_nowait()
            while True:
                with Worker((check, target), command) as worker:
                    while worker.is_alive:
                        found.put({case: worker.result(case, limit_seconds)})
                        case = waiting.get_nowait()

    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(min(at_once, len(cases))):
            pool.submit(work)
        for _ in cases:
            result = found.get()
            for one in result.values():
                OFF.update(one.pop("off", {}))
            yield result


class Worker:
    """A process that checks one case after the other."""

    def __init__(self, order: tuple[str, Target], command: Sequence[str]) -> None:
        """Start the process. `order` has the check and the target."""
        self.is_alive = True
        self._is_ready = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `__exit__` closes it
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **THREADS},
            )
        self._connection.send(order)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, which may hang."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_LIMIT_SECONDS)
        self._connection.close()
        self._log.close()

    def result(self, case: str, limit_seconds: float) -> Result:
        """Check a case. Without an answer in time, the process can't be used again."""
        began = time.monotonic()
        try:
            if not self._is_ready:
                self._receive(START_SECONDS)
                self._is_ready = True
                began = time.monotonic()
            self._connection.send(case)
            found: Result = self._receive(limit_seconds)
            self.is_alive = found.pop("is_alive")
        except TimeoutError:
            self.is_alive = False
            found = self._failed(f"it took longer than {time.monotonic() - began:.0f} s")
        except (EOFError, OSError):
            self.is_alive = False
            found = self._failed(f"its process ended with {self._end()}")
        return {**found, "seconds": round(time.monotonic() - began, 1)}

    def _receive(self, limit_seconds: float) -> Any:
        if not self._connection.poll(limit_seconds):
            raise TimeoutError
        return self._connection.recv()

    def _end(self) -> str:
        try:
            code = self._process.wait(KILL_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "a driver that blocks it"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _failed(self, problem: str) -> Result:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return {"equal": False, "problem": problem, "log": lines[-LAST_LINES:]}
