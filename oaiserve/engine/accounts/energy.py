"""The energy of the machine: RAPL's meters for CPUs and memory, NVML's for GPUs. Stdlib only.

Reading them takes up to milliseconds, so the engine thread never does it: another thread calls `read` about once a
second. Only root can read RAPL's files, unless an administrator permits more.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")
LEAST_NS = 900_000_000  # minimum time between two readings
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counter:
    """A counter of energy, in joules so far. One that wraps begins again at 0 after `wraps_at`."""

    read: Callable[[], float]
    wraps_at: float = 0.0
    last: float = 0.0

    def since_last(self) -> float:
        before = self.last
        self.last = self.read()
        return self.last - before + (self.wraps_at if self.last < before else 0.0)


class Energy:
    """The joules that the machine has used so far, and the power by which a request's shares of time become energy.

    The energy of CPUs is divided evenly among the machine's cores, used or not. That of GPUs belongs to the engine for
    as long as it runs. Idle cores, other processes and waiting belong to no request.
    """

    def __init__(
        self,
        cpu: list[Counter],
        gpu: list[Counter],
        num_cores: int = os.cpu_count() or 1,
        *,
        clock_ns: Callable[[], int],
    ) -> None:
        self._cpu = cpu
        self._gpu = gpu
        self._num_cores = num_cores
        self._clock_ns = clock_ns
        self._read_ns: int | None = None
        self.joules = 0.0  # energy used since the first reading
        # Last measured watts of a core, and of the GPUs; any thread may read them.
        self._watts: tuple[float, float] | None = None

    @classmethod
    def found(cls, clock_ns: Callable[[], int], rapl: Path = RAPL, gpus: Sequence[str] = ()) -> Energy:
        """Return an Energy with the meters that this process can read. If it can read none, no energy is known.
        `gpus` selects GPUs as for `nvml_counters`."""
        return cls(rapl_counters(rapl), nvml_counters(gpus), clock_ns=clock_ns)

    @property
    def is_known(self) -> bool:
        return bool(self._cpu or self._gpu)

    def read(self) -> None:
        """Read the meters, unless they were read a moment ago."""
        now_ns = self._clock_ns()
        last_ns = self._read_ns
        if not self.is_known or (last_ns is not None and now_ns - last_ns < LEAST_NS):
            return
        try:
            cpu, gpu = (sum(counter.since_last() for counter in counters) for counters in (self._cpu, self._gpu))
        except Exception:  # a driver may go away; NVML's errors aren't OSErrors
            log.exception("The meters of energy can no longer be read: requests have no joules from now on")
            self._cpu = []
            self._gpu = []
            self._watts = None
            return
        self._read_ns = now_ns
        if last_ns is not None:
            self.joules += cpu + gpu
            seconds = (now_ns - last_ns) / 1e9
            self._watts = cpu / seconds / self._num_cores, gpu / seconds

    def joules_of(self, core_ns: int, machine_ns: int) -> float | None:
        """Return the energy of these shares at the power of the last second, or None while it is not known."""
        if self._watts is None:
            return None
        per_core, of_gpus = self._watts
        return (core_ns * per_core + machine_ns * of_gpus) / 1e9


def rapl_counters(folder: Path = RAPL) -> list[Counter]:
    """Return the counters of CPU packages and of their memory that this process can read."""
    counters = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            most = int((zone / "max_energy_range_uj").read_text()) / 1e6
            if name.startswith("package") or name == "dram":  # "core" is a part of a package
                counter = Counter(lambda file=zone / "energy_uj": int(file.read_text()) / 1e6, most)  # type: ignore[misc]
                counter.since_last()
                counters.append(counter)
        except (OSError, ValueError):
            continue
    return counters


def nvml_counters(gpus: Sequence[str] = ()) -> list[Counter]:
    """Return the counters of GPUs, as CUDA_VISIBLE_DEVICES names them, if nvidia-ml-py is installed. By default, this
    process uses the first one that it may see."""
    counters = []
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        for named in gpus or [os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"]:
            if named.isdigit():
                gpu = nvml.nvmlDeviceGetHandleByIndex(int(named))
            else:
                gpu = nvml.nvmlDeviceGetHandleByUUID(named)
            counter = Counter(partial(_joules, nvml, gpu))
            counter.since_last()
            counters.append(counter)
    except Exception:  # no such package, no driver, or an older GPU: each raises its own error
        return []
    return counters


def _joules(nvml: Any, gpu: Any) -> float:
    millijoules: int = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    return millijoules / 1e3
