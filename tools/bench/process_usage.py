"""CPU time and memory of a process and all below it, from /proc. Linux."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def peak_rss_mib(pid: int) -> float:
    """Return the sum of the peaks of all processes of the tree that are alive."""
    return sum(_status_kib(each, "VmHWM:") for each in tree(pid)) / 1024


def rss_mib(pid: int) -> float:
    """Return the memory that all processes of the tree hold now."""
    return sum(_status_kib(each, "VmRSS:") for each in tree(pid)) / 1024


def reset_peak_rss(pid: int) -> None:
    """Let the peaks of the processes of the tree begin anew, at what they hold now."""
    for each in tree(pid):
        Path(f"/proc/{each}/clear_refs").write_text("5")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the tree, with that of children that have ended and were waited for."""
    return sum(sum(map(int, _stat(each)[11:15])) for each in tree(pid)) / _TICKS_PER_SECOND


def machine_cpu_seconds() -> float:
    """Return the CPU time of all processes of the machine since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_SECOND


def tree(pid: int) -> list[int]:
    """Return the ids of the process and of all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, the state first; none for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _status_kib(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
