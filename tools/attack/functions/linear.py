"""How the CPU time of code grows with its input."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

FACTOR = 8
MOST_GROWTH = 2.5 * FACTOR  # linear: about 8; quadratic: about 64
_LEAST_SECONDS = 2e-4


class Case(NamedTuple):
    """A function that is to take time linear in the size of its input."""

    name: str
    run: Callable[[int], object]  # runs the function with an input of about this size
    size: int  # the smaller of the two sizes that are compared


def repeated(begin: str, unit: str, end: str = "") -> Callable[[int], str]:
    """Return a function that makes a text of about a length."""
    return lambda size: begin + unit * (size // len(unit)) + end


def cut(text: str, length: int) -> Iterator[str]:
    """Yield a text in pieces of this length, or as a whole for 0."""
    step = length or max(1, len(text))
    return (text[start : start + step] for start in range(0, len(text), step))


def is_linear(run: Callable[[int], object], size: int) -> bool:
    """Return whether `run` takes no more than MOST_GROWTH times the CPU time for FACTOR times the size.

    Something else may disturb a measurement, so there are three."""
    return any(_seconds(run, FACTOR * size) < MOST_GROWTH * max(_seconds(run, size), _LEAST_SECONDS) for _ in range(3))


def _seconds(run: Callable[[int], object], size: int) -> float:
    gc.disable()
    try:
        began = time.process_time()
        run(size)
        return time.process_time() - began
    finally:
        gc.enable()
