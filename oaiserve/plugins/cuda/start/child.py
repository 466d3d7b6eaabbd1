"""Runs probes of a GPU in child processes, so that a kernel that hangs or corrupts memory can't harm the server.

A probe reads its order from stdin. It prints a line with the verdict on all features and the ways of products, and then
computes with those. If a kernel doesn't fit, it does both again without that kernel. It exits with 0 if the features of
its last line are usable, and with DECLINED if the model can't be started anyway. Otherwise, the last line of its log is
the reason.
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
from typing import NamedTuple

import msgspec

from oaiserve.config import EngineOptions
from oaiserve.plugins.cuda.start.features import BY_TORCH, Probed, Verdict, all_off

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "oaiserve.plugins.cuda.start.probe")
DECLINED = 3
FOUND = "found: "  # prefix of the line with a probe's findings, as JSON
# A probe that takes longer hangs: compiling kernels takes about a minute, and reading weights from a slow disk takes a
# few.
LIMIT_SECONDS = 600.0
KILL_LIMIT_SECONDS = 10.0  # limit after a kill, because the driver may delay the process's end
_SHOWN = 300  # characters of the log's last line that are shown


class Order(NamedTuple):
    """The model whose layers are probed."""

    model: str  # a folder or a file
    options: EngineOptions
    device: str
    verdict: Verdict  # the verdict before the probe; features that have a reason to be off are not tried


def probed(order: Order, command: Sequence[str] = COMMAND, limit_seconds: float = LIMIT_SECONDS) -> Probed | None:
    """Return the verdict on each feature, and the ways of products, or None for a model that cannot be started anyway.

    If a probe fails, a second one tries only kernels and graphs, if that is less, and a third one tries no graphs
    either.
    """
    while True:
        code, reason, found = _run(order, command, limit_seconds)
        if code == DECLINED:
            return None
        verdict = order.verdict
        if found is not None:  # A feature that is off stays off, so the loop ends whatever a probe reports.
            verdict = {feature: why or found.verdict[feature] for feature, why in order.verdict.items()}
            if code == 0:
                return msgspec.structs.replace(found, verdict=verdict)
        log.debug("A probe of the GPU failed: %s", reason)
        used = next(
            (features for features in (BY_TORCH, ("graphs",)) if not all(map(verdict.__getitem__, features))), None
        )
        if used is None:
            return Probed(all_off(reason))
        order = order._replace(verdict={**order.verdict, **dict.fromkeys(used, reason)})


def _run(order: Order, command: Sequence[str], limit_seconds: float) -> tuple[int | None, str, Probed | None]:
    """Run a probe. Return its exit code, or None if it took too long; how it ended; and what its last line said."""
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
        said = [line.removeprefix(FOUND) for line in lines if line.startswith(FOUND)]
        last = [line for line in lines if not line.startswith(FOUND)][-1:]
        reason = ": ".join([end, *(line[:_SHOWN] for line in last)])
        return code, reason, msgspec.json.decode(said[-1], type=Probed) if said else None
