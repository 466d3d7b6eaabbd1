"""Reads the CPU time, the memory and the number of open files of another process, from Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The fields of /proc/PID/stat behind the name, which may have spaces: utime, stime and rss are the 14th, 15th and 24th.
_USER, _SYSTEM, _RESIDENT = 11, 12, 21


class ProcessNumbers(NamedTuple):
    """The numbers of a process at one moment."""

    cpu_seconds: float
    resident_bytes: int
    open_files: int


def numbers_of(pid: int) -> ProcessNumbers | None:
    """Return the numbers of a process, or None if it is gone, or where there is no /proc."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        open_files = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    cpu_ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return ProcessNumbers(cpu_ticks / _TICKS, int(fields[_RESIDENT]) * _PAGE_BYTES, open_files)
