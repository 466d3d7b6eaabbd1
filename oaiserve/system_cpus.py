"""The default number of threads on a CPU, and the largest sensible one."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from oaiserve.system_cgroups import Cgroup, cgroups

_FEW_CORES = 4


def default_threads(cpus: Collection[int] | None = None, root: Path = Path("/")) -> int:
    """Return one thread for each core of this process, within the quota of its cgroups.

    With at least 4 cores, it is one thread less, so that a core is free for the event loop, the tokenizers and
    telemetry. The hardware threads of one core (SMT) share its arithmetic units, so they count as one core. `cpus` are
    the CPUs on which the process may run; by default, those that the system reports. `root` is the folder that contains
    proc/ and sys/.
    """
    cores = len({_siblings(cpu, root) for cpu in (allowed_cpus() if cpus is None else cpus)})
    if (quota := _quota(root)) is not None:
        cores = min(cores, max(1, int(quota)))
    if cores < _FEW_CORES:
        return cores
    return cores - 1


def usable_cpus(cpus: Collection[int] | None = None, root: Path = Path("/")) -> int:
    """Return on how many CPUs this process may run at once: all hardware threads of its cores, within its quota."""
    number = len(allowed_cpus() if cpus is None else cpus)
    quota = _quota(root)
    if quota is None:
        return number
    return min(number, max(1, math.ceil(quota)))


def allowed_cpus() -> Collection[int]:
    """Return the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(cpu: int, root: Path) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> float | None:
    """Return how many CPUs the cgroups of this process allow it to use, or None if none has a limit."""
    return min((limit for one in cgroups("cpu", root) if (limit := _limit(one)) is not None), default=None)


def _limit(cgroup: Cgroup) -> float | None:
    try:
        if cgroup.version == 2:
            quota, period = (cgroup.folder / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup.folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        limit = int(quota) / int(period)  # "max" or -1: no limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return limit if limit > 0 else None
