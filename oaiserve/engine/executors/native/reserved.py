"""Memory for weights, which a thread requests from the system while the start imports code. Stdlib only.

The system provides and clears memory when it is first written. In a virtual machine, the host has to find that memory,
too, which can take longer than packing weights into it. On systems other than Linux, nothing is reserved.

The thread writes zeros. The alternative, requesting all pages of a piece at once (MADV_POPULATE_WRITE), would delay the
imports, which map files and memory: the process's memory map is locked until the whole piece is there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from oaiserve.runtime import AT_ONCE, ENDED, Runtime, When, Worker
from oaiserve.system_memory import available_bytes

_HUGE_PAGE_BYTES = 2**21
_PIECE_BYTES = 2**25  # bytes requested between two checks of whether the memory is still wanted


class ReservedMemory:
    """Memory that begins at a huge page. It is released with the last reference to it."""

    def __init__(self, num_bytes: int, runtime: Runtime) -> None:
        """Reserve memory, and start to request it from the system. Raises OSError."""
        self.num_bytes = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.num_taken = 0  # bytes that the system has provided
        size = self.num_bytes + _HUGE_PAGE_BYTES
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._advise = ctypes.CDLL(None, use_errno=True).madvise
        self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._advise(self.address, self.num_bytes, mmap.MADV_HUGEPAGE)  # may fail: small pages are only slower
        self._is_enough = False
        self._worker: Worker[None] = runtime.worker("reserve", self._take)
        self._worker.start()

    def stop(self) -> None:
        """Stop reserving, so that the memory can be written. The system provides the rest at the first write."""
        self._is_enough = True
        self._worker.join()

    def keep(self, num_bytes: int) -> None:
        """Return all but the first bytes to the system."""
        self.stop()
        begin = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < self.num_bytes and self._advise(self.address + begin, self.num_bytes - begin, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")

    def _take(self) -> When:
        if self._is_enough or self.num_taken >= self.num_bytes:
            return ENDED
        num_bytes = min(_PIECE_BYTES, self.num_bytes - self.num_taken)
        ctypes.memset(self.address + self.num_taken, 0, num_bytes)
        self.num_taken += num_bytes
        return AT_ONCE


def packed_bytes(num_bytes: int) -> int:
    """Return the most memory that the packed weights of a GGUF file of this size take.

    Some formats scale by small integers and exponents, which get a byte or two each: MXFP4 grows by a seventeenth.
    """
    return num_bytes + num_bytes // 16


def reserve(num_bytes: int, runtime: Runtime) -> ReservedMemory | None:
    """Reserve memory on Linux, unless it is more than half of the available memory, or the system refuses.

    If it returns None, memory is allocated as weights are packed.
    """
    if sys.platform != "linux" or num_bytes > available_bytes() // 2:
        return None
    try:
        return ReservedMemory(num_bytes, runtime)
    except OSError:
        return None
