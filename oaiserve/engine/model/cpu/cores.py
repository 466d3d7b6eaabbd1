"""How many threads should compute."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_FEW_CORES = 4


def default_threads(cpus: Collection[int] | None = None, root: Path = Path("/")) -> int:
    """One for each core that this process may use, within its cgroup's quota; with 4 or more, one is left to the event
    loop, the tokenizers and telemetry. Two threads of one core (SMT) share its arithmetic, so they count once.

    `cpus` are those that the process may run on, by default what the system says; `root` is where sys/ is mounted.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(cpu, root) for cpu in cpus})
    if (quota := _quota(root)) is not None:
        cores = min(cores, max(1, int(quota)))
    return cores if cores < _FEW_CORES else cores - 1


def _siblings(cpu: int, root: Path) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> float | None:
    """CPUs that the cgroup (v2) allows; None: no limit."""
    try:
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
