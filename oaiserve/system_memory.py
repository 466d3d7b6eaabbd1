"""Gives freed memory back to the system, takes it again when nobody waits for it, and asks how much there is.

Stdlib only; without glibc, nothing is given back or taken.

The system finds each page when it is first written, which takes up to three milliseconds for a megabyte. Where Python
writes it, that is with the interpreter's lock, and all threads wait.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Parameters of mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOST_MMAP_THRESHOLD_BYTES = 32 * 2**20  # the most that glibc takes
TRIM_THRESHOLD_BYTES = 64 * 2**20  # the copies of the largest body by default, and some more
MOST_COPIES = 4  # copies of a large body, in different forms, while it is parsed and rendered


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt, libc.malloc_trim  # noqa: B018
    except (OSError, TypeError, AttributeError):
        return None
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


_libc = _glibc()  # Its calls are made without the interpreter's lock.


def keep_freed() -> None:
    """Keep freed memory in this process for the next allocations, until `give_back`."""
    if _libc is not None:
        _libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD_BYTES)
        _libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def take(num_bytes: int) -> None:
    """Have the system find the pages for this thread's next copies of a body. It helps after `keep_freed`."""
    if _libc is None:
        return
    num_bytes = min(num_bytes, MOST_MMAP_THRESHOLD_BYTES // 2)
    taken = [_libc.malloc(num_bytes) for _ in range(MOST_COPIES)]
    for address in filter(None, taken):
        _libc.memset(address, 0, num_bytes)
    for address in taken:
        _libc.free(address)


def give_back() -> None:
    """Give all empty pages back to the system.

    glibc keeps the memory between two living allocations, in an arena of each thread: after some large bodies, a
    gigabyte. This takes milliseconds.
    """
    if _libc is not None:
        _libc.malloc_trim(0)


def available_bytes() -> int:
    """Return the bytes available without swapping, or all memory if the system does not report them."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
