"""Keeps Python's garbage collector from running while JSON is decoded. Stdlib only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_BYTES = 2**16  # Decoding less JSON than this runs the collector a few times at most.


@contextmanager
def paused_for(num_bytes: int) -> Iterator[None]:
    """Pause the collector while `num_bytes` of JSON are decoded, if that is a lot.

    Decoding makes many objects and no garbage, but every few thousand new objects run the collector, which looks at
    all new ones and holds the GIL meanwhile. Of two threads that pause at once, the first one ends the pause of both.
    """
    is_pausing = num_bytes >= LARGE_BYTES and gc.isenabled()
    if is_pausing:
        gc.disable()
    try:
        yield
    finally:
        if is_pausing:
            gc.enable()
