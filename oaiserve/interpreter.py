"""How Python shares its lock, collects garbage and starts another one, in a process with an engine. Stdlib only."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# How long a thread that computes in Python may keep the others from it. The engine thread needs Python several times in
# each step of some milliseconds, so with Python's own 5 ms, one large request could double the time of each step.
SWITCH_SECONDS = 0.0005
# New objects that may live before the collector looks at them. Python's own 700 are less than a step of 256 sequences
# makes, so the collector would run in each step. 10,000 objects take some megabytes.
MOST_NEW_OBJECTS = 10_000


def child_environment() -> dict[str, str]:
    """Return the environment for another Python that finds the same modules as this one."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def switch_often() -> None:
    """Let threads that wait for the interpreter's lock have it soon, as a server needs, which reads large bodies."""
    sys.setswitchinterval(SWITCH_SECONDS)


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Within the block, let a thread that waits for the interpreter's lock have it after this time."""
    before_seconds = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_seconds)


def begin_load() -> None:
    """Prepare to load a model. Until `end_load`, each collection would examine everything that has been imported, and
    all of that stays."""
    gc.disable()


def end_load() -> None:
    """Collect garbage from now on, but never look again at all that stays: torch and transformers alone are a million
    objects, and a full collection would stop all threads for a sixth of a second."""
    if "transformers" in sys.modules:  # Imports leave hardly any garbage, but the load of a model by transformers does.
        gc.collect()
    gc.freeze()
    gc.set_threshold(MOST_NEW_OBJECTS)
    gc.enable()
