"""Pauses Python's garbage collector while JSON is decoded, and leaves its time out of CPU limits. Stdlib only."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import thread_time_ns

LARGE_BYTES = 2**16  # Decoding less JSON than this triggers at most a few collections.


@contextmanager
def paused_for(num_bytes: int) -> Iterator[None]:
    """Pause the collector while `num_bytes` of JSON are decoded, if that is a lot.

    Decoding creates many objects and no garbage, but every few thousand new objects trigger a collection, which scans
    all new ones and holds the GIL meanwhile. If two threads pause at once, the first to finish ends the pause for both.
    """
    is_pausing = num_bytes >= LARGE_BYTES and gc.isenabled()
    if is_pausing:
        gc.disable()
    try:
        yield
    finally:
        if is_pausing:
            gc.enable()


class _Collections(threading.local):
    """The CPU time of the garbage collections in this thread."""

    began_ns = 0
    total_ns = 0


_collections = _Collections()


def _note(phase: str, _: Mapping[str, int]) -> None:
    if phase == "start":
        _collections.began_ns = thread_time_ns()
    else:
        _collections.total_ns += thread_time_ns() - _collections.began_ns


gc.callbacks.append(_note)


def thread_work_ns() -> int:
    """Return this thread's CPU time without garbage collections. A limit on CPU time should not count them: any thread
    may have to run one, and a full one, which visits all objects of the process, may take longer than the limit."""
    return thread_time_ns() - _collections.total_ns
