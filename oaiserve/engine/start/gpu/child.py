"""Runs probes of a GPU in child processes, so that a kernel that hangs or corrupts memory does no harm to the server.

A probe reads its order from stdin. It ends with 0 if all features of the order are usable, and with DECLINED if the
model cannot be started anyway. Otherwise, the last line of its log is the reason.
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu.features import FEATURES, Verdict, all_off

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "oaiserve.engine.start.gpu.probe")
DECLINED = 3
# A probe that takes longer hangs: compiling kernels takes about a minute, and reading weights from a slow disk some.
LIMIT_SECONDS = 600.0
KILL_LIMIT_SECONDS = 10.0  # A process may live on after this, if the driver blocks its end.
_SHOWN = 300  # characters of the last line of a probe's log


class Order(NamedTuple):
    """The model whose layers are probed."""

    model: str  # a folder or a file
    options: EngineOptions
    device: str


def probed(order: Order, command: Sequence[str] = COMMAND, limit_seconds: float = LIMIT_SECONDS) -> Verdict | None:
    """Return the verdict on each feature, or None for a model that cannot be started anyway.

    If a probe fails, another one tries kernels without graphs.
    """
    code, reason = _run(order, command, limit_seconds)
    if code == DECLINED:
        return None
    if code == 0:
        return dict.fromkeys(FEATURES, "")
    log.debug("A probe of the GPU failed: %s", reason)
    if order.options.cuda_graph:
        without_graphs = order._replace(options=replace(order.options, cuda_graph=False))
        if _run(without_graphs, command, limit_seconds)[0] == 0:
            return {"kernels": "", "graphs": reason}
    return all_off(reason)


def _run(order: Order, command: Sequence[str], limit_seconds: float) -> tuple[int | None, str]:
    """Run a probe. Return its exit code, or None if it took too long, and how it ended."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)
        assert process.stdin is not None
        code: int | None = None
        end = f"its probe took longer than {limit_seconds:.0f} s"
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(pickle.dumps(order))
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_seconds)
                end = "its probe ended with " + (f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_LIMIT_SECONDS)
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        return code, ": ".join([end, *(line[:_SHOWN] for line in lines[-1:])])
