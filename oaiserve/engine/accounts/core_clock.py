"""The clock frequency of the cores, where Linux reports it. Virtual machines mostly don't, and then no loss is
reported."""

from __future__ import annotations

from pathlib import Path

MOST_CORES = 16  # cores whose clocks are read
# Share of the highest frequency so far above which a frequency is normal. A single busy core runs that much faster than
# all cores together.
NORMAL = 0.75


class CoreClock:
    """Compares the fastest core with the highest frequency so far. Idle cores are slow, so the others don't count."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` is the folder that has sys/."""
        cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
        self._files = sorted(cores)[:MOST_CORES]
        self._highest = 0

    def lost_share(self) -> float:
        """Return by which share the frequency is below the highest one so far, or 0.0 while it is normal."""
        try:
            now = max((int(file.read_text()) for file in self._files), default=0)
        except (OSError, ValueError):  # A core was turned off, or its driver doesn't report it.
            return 0.0
        self._highest = max(self._highest, now)
        return 1 - now / self._highest if now < NORMAL * self._highest else 0.0
