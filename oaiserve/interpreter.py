"""Settings of the Python interpreter in a process with an engine: its lock, garbage collection, and child processes.
Stdlib only."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# How long a thread that runs Python code may hold the GIL while others wait. The engine thread needs it several times
# in each step of a few milliseconds, so with Python's default of 5 ms, one large request could double the step time.
SWITCH_SECONDS = 0.0005
# New objects that trigger a garbage collection. A step of 256 sequences creates more than Python's default of 700, so
# the collector would run in each step. 10,000 objects take a few megabytes.
MOST_NEW_OBJECTS = 10_000


def child_environment() -> dict[str, str]:
    """Return the environment for another Python process that finds the same modules as this one."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def switch_often() -> None:
    """Let threads get the GIL soon. A server needs this, because parsing large bodies would otherwise block the other
    threads."""
    sys.setswitchinterval(SWITCH_SECONDS)


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Within the block, let a thread that waits for the GIL have it after this time."""
    before_seconds = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_seconds)


def begin_load() -> None:
    """Disable garbage collection while a model is loaded. Until `end_load`, each collection would scan everything that
    has been imported, and find nothing to free."""
    gc.disable()


def end_load() -> None:
    """Collect garbage from now on, but never scan the objects that exist already: torch and transformers alone have a
    million, and a full collection would stop all threads for a sixth of a second."""
    if "transformers" in sys.modules:  # Imports leave hardly any garbage, but loading a model with transformers does.
        gc.collect()
    gc.freeze()
    gc.set_threshold(MOST_NEW_OBJECTS)
    gc.enable()
