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
from oaiserve.engine.start.gpu.trials import FEATURES, Verdict

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "oaiserve.engine.start.gpu.probe")
KILL_LIMIT_SECONDS = 10.0  # A process may live on after this, if the driver blocks its end.
_END_LIMIT_SECONDS = 30.0  # time in which a process with a verdict must end
_SHOWN = 300  # characters of the last line of a probe's log


class Limits(NamedTuple):
    """Time limits in seconds of a trial, of which compiling kernels takes about a minute, and of other work, such as
    reading weights from a slow disk."""

    trial: float = 300.0
    between: float = 900.0


LIMITS = Limits()


class Order(NamedTuple):
    """The model whose layers are probed."""

    model: str  # a folder or a file
    options: EngineOptions
    device: str


class _ProbeFailed(Exception):
    """A probe ended without a verdict. The arguments are the feature that was tried, or None, and the reason."""


def probed(order: Order, command: Sequence[str] = COMMAND, limits: Limits = LIMITS) -> Verdict | None:
    """Return the verdict on each feature. Return None for a model that cannot be started anyway.

    If a trial ends a probe or takes too long, the next probe skips that feature. If a probe ends outside of trials, all
    features are off.
    """
    known: Verdict = {}
    while True:
        try:
            return _run(pickle.dumps((order, known)), command, limits)
        except _ProbeFailed as failure:
            feature, reason = failure.args
        log.debug("A probe of the GPU failed in %s: %s", feature or "no trial", reason)
        failed = list(FEATURES)
        if feature is not None and feature not in known:
            failed = [feature]
        known = {**dict.fromkeys(failed, reason), **known}
        if len(known) == len(FEATURES):
            return known


def _run(order: bytes, command: Sequence[str], limits: Limits) -> Verdict | None:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None
        assert process.stdout is not None
        lines: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_read, args=(process.stdout, lines), name="probe", daemon=True).start()
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(order)
            verdict = _verdict(process, lines, limits, errors)
            with suppress(subprocess.TimeoutExpired):  # The verdict counts, however the process ends.
                process.wait(_END_LIMIT_SECONDS)
            return verdict
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_LIMIT_SECONDS)


def _read(stdout: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(b"")


def _verdict(
    process: subprocess.Popen[bytes], lines: SimpleQueue[bytes], limits: Limits, errors: IO[bytes]
) -> Verdict | None:
    """Return the verdict that a process writes. Raises _ProbeFailed."""
    feature: str | None = None
    limit = limits.between
    try:
        while line := lines.get(timeout=limit):
            message: dict[str, Any] = json.loads(line)
            if "verdict" in message:
                verdict: Verdict | None = message["verdict"]
                return verdict
            if "failed" in message:
                raise _ProbeFailed(feature, message["failed"])
            feature = message["trying"]
            limit = limits.between if feature is None else limits.trial
        code = process.wait(limits.trial)
    except (Empty, subprocess.TimeoutExpired):
        raise _ProbeFailed(feature, f"its trial took longer than {limit:.0f} s") from None
    except ValueError:
        raise _ProbeFailed(feature, "its trial wrote something else than JSON") from None
    end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    raise _ProbeFailed(feature, f"its trial ended a process with {end}{_last_line(errors)}")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:_SHOWN]}" if last else ""
