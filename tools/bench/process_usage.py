"""CPU time and memory of a process and its descendants, on Linux."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def peak_rss_mib(pid: int) -> float:
    """Return the sum of the peaks of all processes of the tree that are alive."""
    return _sum(pid, lambda process: _peak_kib(process.pid)) / 1024


def rss_mib(pid: int) -> float:
    """Return the memory that all processes of the tree hold now."""
    return _sum(pid, lambda process: process.memory_info().rss) / 2**20


def reset_peak_rss(pid: int) -> None:
    """Reset the peaks of the tree's processes to their current use."""
    _sum(pid, lambda process: Path(f"/proc/{process.pid}/clear_refs").write_text("5"))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the tree, with that of children that have ended and were waited for."""
    return _sum(pid, lambda process: sum(process.cpu_times()[:4]))


def machine_cpu_seconds() -> float:
    """Return the CPU time of all processes of the machine since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _sum(pid: int, of: Callable[[psutil.Process], float]) -> float:
    """Return the sum over a process and all below it. What has ended meanwhile counts nothing."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                total += of(each)
    return total


def _peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
