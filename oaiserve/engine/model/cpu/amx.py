"""AMX, the tile registers of some Intel CPUs. Linux lets a process use them on request, and may refuse."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

log = logging.getLogger(__name__)

FEATURES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})  # as /proc/cpuinfo calls them
FLAG = "-DWITH_AMX"  # makes src/amx.h use the compiler's support
_ARCH_PRCTL = 158  # the number of the system call on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_TILE_DATA = 18  # the number of the part of a thread's state


def is_usable(features: frozenset[str]) -> bool:
    """Return whether this process may use AMX on a CPU with these features, asking Linux if the CPU has it."""
    return features >= FEATURES and _may_use_tiles()


@cache  # the answer holds for all threads of a process, and for processes that it forks
def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers. Where it refuses, as in some sandboxes, the log says so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0:
        return True
    log.warning("AMX is not used, because the system refuses its registers: %s", os.strerror(ctypes.get_errno()))
    return False
