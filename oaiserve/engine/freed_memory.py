"""Gives memory that has been freed back to the system. Stdlib only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # no glibc
        return None
    return trim


_trim = _malloc_trim()


def give_back() -> None:
    """Give all pages back that hold nothing any more.

    glibc keeps what lies between two allocations that live, in an arena of each thread: after some large bodies, that
    is a gigabyte. This takes milliseconds, without the interpreter's lock. Without glibc, it does nothing.
    """
    if _trim is not None:
        _trim(0)
