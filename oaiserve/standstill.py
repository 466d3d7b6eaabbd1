"""Detects standstills of the whole process, and logs a line about each. Stdlib only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

STILL_NS = 2_000_000_000  # A shorter one may only mean that the machine is busy.
LOOK_SECONDS = 1.0
USED_SHARE = 0.1  # A process that used more of a core than this was only slow.


def log_standstill(log: logging.Logger, who: str, still_ns: int) -> None:
    log.warning(
        "The %s stood still for %.1f s: a signal or a debugger stopped it, its container was frozen, or its virtual "
        "machine was paused",
        who,
        still_ns / 1e9,
    )


async def watch_for_standstills(
    log: logging.Logger, who: str, clock_ns: Callable[[], int], cores_ns: Callable[[], int]
) -> None:
    """Log each standstill of this process, until cancelled. `cores_ns` returns the CPU time that it has used."""
    while True:
        before_ns = clock_ns()
        before_cores_ns = cores_ns()
        await asyncio.sleep(LOOK_SECONDS)
        still_ns = clock_ns() - before_ns - int(LOOK_SECONDS * 1e9)
        if still_ns > STILL_NS and cores_ns() - before_cores_ns < USED_SHARE * still_ns:
            log_standstill(log, who, still_ns)
