"""Runs probes of a GPU in child processes, so that a kernel that hangs or corrupts memory does no harm to the server.

A probe reads its order from stdin, and writes messages to stdout, lines of JSON: ["trying", feature] before a trial,
["trying", null] before other work, and ["verdict", verdict] at its end.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu.trials import FEATURES, Verdict

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "oaiserve.engine.start.gpu.probe")
# A probe without a message for this long hangs: compiling kernels takes about a minute, and reading weights from a slow
# disk may take some.
LIMIT_SECONDS = 300.0
KILL_LIMIT_SECONDS = 10.0  # A process may live on after this, if the driver blocks its end.
_SHOWN = 300  # characters of the last line of a probe's log


class Order(NamedTuple):
    """The model whose layers are probed."""

    model: str  # a folder or a file
    options: EngineOptions
    device: str


def probed(order: Order, command: Sequence[str] = COMMAND, limit_seconds: float = LIMIT_SECONDS) -> Verdict | None:
    """Return the verdict on each feature. Return None for a model that cannot be started anyway.

    If a trial ends a probe or takes too long, the next probe skips that feature. If a probe ends outside of trials, all
    features are off.
    """
    known: Verdict = {}
    while len(known) < len(FEATURES):
        (what, value), reason = _run(pickle.dumps((order, known)), command, limit_seconds)
        if what == "verdict":
            verdict: Verdict | None = value
            return verdict
        log.debug("A probe of the GPU failed in %s: %s", value or "no trial", reason)
        failed: Iterable[str] = FEATURES
        if value is not None and value not in known:
            failed = [value]
        known = {**dict.fromkeys(failed, reason), **known}
    return known


def _run(order: bytes, command: Sequence[str], limit_seconds: float) -> tuple[Any, str]:
    """Run a probe, and return its last message and how it ended."""
    with tempfile.TemporaryFile() as messages, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=messages, stderr=errors)
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(order)
            end = _end(process, messages, limit_seconds)
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_LIMIT_SECONDS)
        message: Any = ["trying", None]
        with suppress(ValueError):  # It may have ended before its first message.
            message = json.loads(_last_line(messages))
        return message, ": ".join(filter(None, (end, _last_line(errors)[:_SHOWN])))


def _end(process: subprocess.Popen[bytes], messages: IO[bytes], limit_seconds: float) -> str:
    """Wait until a probe ends, or writes no message for too long, and return how it ended."""
    size = -1
    while os.fstat(messages.fileno()).st_size > size:
        size = os.fstat(messages.fileno()).st_size
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_seconds)
            end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            return f"its trial ended a process with {end}"
    return f"its trial took longer than {limit_seconds:.0f} s"


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return next(reversed(lines), "")
