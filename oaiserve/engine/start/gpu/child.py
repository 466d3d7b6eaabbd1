"""Runs probes of a GPU in child processes, so that a kernel that hangs or corrupts memory does no harm to the server.

A probe reads its order from stdin, and writes lines of JSON to stdout: each feature before its trial, and the verdict.
"""

from __future__ import annotations

import json
import logging
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu.trials import FEATURES
from oaiserve.engine.start.gpu.verdict import Verdict

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "oaiserve.engine.start.gpu.probe")
LIMIT_SECONDS = 180.0  # time limit of a trial, in which compiling kernels takes about a minute
LIMIT_BETWEEN_SECONDS = 900.0  # time limit of other work, such as reading weights from a slow disk
END_LIMIT_SECONDS = 30.0  # time in which a process with a verdict must end
KILL_LIMIT_SECONDS = 10.0  # A process may live on after this, if the driver blocks its end.
_SHOWN = 300  # characters of the last line of a probe's log


class Order(NamedTuple):
    """The model whose layers are probed, and the verdict so far."""

    model: str  # a folder or a file
    options: EngineOptions
    device: str
    verdict: Verdict = Verdict()
    limit_seconds: float = LIMIT_SECONDS
    limit_between_seconds: float = LIMIT_BETWEEN_SECONDS

    def limit_of(self, feature: str | None) -> float:
        """Return the limit of the trial of a feature, or of other work."""
        return self.limit_between_seconds if feature is None else self.limit_seconds


class _End(NamedTuple):
    """The end of a probe."""

    verdict: Verdict | None  # None if it failed
    declined: bool  # whether the model cannot be started, for a reason that the start itself will find
    feature: str | None  # the feature that was being tried
    reason: str


def probed(order: Order, command: Sequence[str] = COMMAND) -> Verdict | None:
    """Return the verdict on each feature. Return None for a model that cannot be started anyway.

    If a trial ends a probe or takes too long, the next probe skips that feature. If a probe ends outside of trials, all
    features are off.
    """
    known = Verdict(dict(order.verdict.off), order.verdict.problems)
    while True:
        end = _run(order._replace(verdict=known), command)
        if end.declined or end.verdict is not None:
            return end.verdict
        problems = frozenset([end.feature]) if end.feature is not None else frozenset(FEATURES)
        if problems <= known.problems:
            problems = frozenset(FEATURES)
        log.debug("A probe of the GPU failed in %s: %s", end.feature or "no trial", end.reason)
        known = Verdict(dict.fromkeys(problems, end.reason) | dict(known.off), known.problems | problems)
        if len(known.problems) == len(FEATURES):
            return known


def _run(order: Order, command: Sequence[str]) -> _End:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None
        assert process.stdout is not None
        lines: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_read, args=(process.stdout, lines), name="probe", daemon=True).start()
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(pickle.dumps(order))
            end = _ended(process, lines, order, errors)
            if end.verdict is not None:  # The verdict counts, however the process ends.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_LIMIT_SECONDS)
            return end
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_LIMIT_SECONDS)


def _read(stdout: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(b"")


def _ended(process: subprocess.Popen[bytes], lines: SimpleQueue[bytes], order: Order, errors: IO[bytes]) -> _End:
    feature: str | None = None
    try:
        while line := lines.get(timeout=order.limit_of(feature)):
            found: dict[str, Any] = json.loads(line)
            if "failed" in found:
                return _End(None, False, feature, found["failed"])
            feature = found.get("trying")
            if "off" in found:
                return _End(Verdict(found["off"], frozenset(found["problems"])), False, None, "")
            if found.get("declined"):
                return _End(None, True, None, "")
        code = process.wait(order.limit_seconds)
    except (Empty, subprocess.TimeoutExpired):
        return _End(None, False, feature, f"its trial took longer than {order.limit_of(feature):.0f} s")
    except ValueError:
        return _End(None, False, feature, "its trial wrote something else than JSON")
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return _End(None, False, feature, f"its trial ended a process with {how}{_last_line(errors)}")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    written = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(written) if line.strip()), "")
    return f": {last[:_SHOWN]}" if last else ""
