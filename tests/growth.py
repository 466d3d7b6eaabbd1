"""How the CPU time of code grows with its input."""

import gc
import time
from collections.abc import Callable, Iterator

FACTOR = 8
MOST_GROWTH = 2.5 * FACTOR  # linear: about 8; quadratic: about 64


def cut(text: str, length: int) -> Iterator[str]:
    """Yield a text in pieces of this length, or as a whole for 0."""
    step = length or max(1, len(text))
    return (text[start : start + step] for start in range(0, len(text), step))


def growth(run: Callable[[int], object], size: int) -> float:
    """Return how many times as much CPU time `run` takes for FACTOR times the size."""
    return _least_seconds(run, FACTOR * size) / _least_seconds(run, size)


def _least_seconds(run: Callable[[int], object], size: int) -> float:
    found = []
    gc.disable()
    try:
        for _ in range(3):
            began = time.process_time()
            run(size)
            found.append(time.process_time() - began)
    finally:
        gc.enable()
    return max(min(found), 1e-4)
