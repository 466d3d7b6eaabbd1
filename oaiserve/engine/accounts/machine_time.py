"""The time that the machine did not run the engine though it was ready to run, as Linux accounts for it. Stdlib only.

It is asked for when a step, or the time before it, was long. What held up the threads of native code, page faults that
had to read a disk, and a cgroup's limit are only asked for when a step was much too slow. What the system does not tell
counts as nothing. Of the files, only that of the engine thread stays open: other threads come and go.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from oaiserve.facts.times import monotonic_ns

TASKS = Path("/proc/self/task")
CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
LOOK_NS = 1_000_000_000  # after which threads are looked at again
FIND_NS = 5_000_000_000  # after which it is asked again which threads there are
WORKING = 0.25  # a thread works if it ran for this part of the time of the one that ran most


def major_faults() -> int:
    """Return how many pages the process has waited for that had to be read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class MachineTime:
    """Reads the delays of the thread that calls it first, and of the threads of native code beside it."""

    def __init__(
        self,
        tasks: Path = TASKS,
        throttling: Path | None = None,
        page_faults: Callable[[], int] = major_faults,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._tasks = tasks
        self._throttling = throttling
        self._page_faults = page_faults
        self._clock_ns = clock_ns
        self._own: int | None = None  # the open file of the calling thread; None: it has not called yet
        self.num_threads = 1  # that share a step's work: the calling one, and those of native code that worked lately
        self._delay_ns = 0
        self._others: dict[str, tuple[int, int]] = {}  # by thread: its time on a core, and its delay
        self._looked_ns = self._found_ns = -2 * FIND_NS
        self._num_faults = 0
        self._throttled_ns = 0

    def delay_ns(self) -> int:
        """Return how long the calling thread was ready to run, and did not run, since the last call."""
        if self._own is None:
            self._own = self._opened(str(threading.get_native_id()))
            self._delay_ns = self._own_delay_ns(self._own)
        now_ns = self._clock_ns()
        if now_ns - self._found_ns > FIND_NS:
            self._found_ns = now_ns
            self._find_others()
        if now_ns - self._looked_ns > LOOK_NS:
            self._look()
        before_ns, self._delay_ns = self._delay_ns, self._own_delay_ns(self._own)
        return self._delay_ns - before_ns

    def _opened(self, thread: str) -> int:
        """Open the statistics of a thread until this object is gone. Return the file, or -1 if there is none."""
        try:
            file = os.open(self._statistics(thread), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        weakref.finalize(self, os.close, file)
        return file

    def _own_delay_ns(self, file: int) -> int:
        try:
            return _numbers(os.pread(file, 100, 0))[1]
        except (OSError, ValueError):
            return self._delay_ns

    def more_ns(self, most_ns: int) -> int:
        """Return how much of `most_ns`, by which a step was too slow, the machine held up other threads.

        That is the delay of the threads of native code, shared among those that worked, and the time for which the
        limit of a cgroup let nothing run. How long a page fault takes is not told: if there was one, all of it is the
        machine's.
        """
        num_faults, throttled_ns = self._num_faults, self._throttled_ns
        delay_ns = self._look()
        if self._num_faults > num_faults:
            return most_ns
        return min(most_ns, max(delay_ns // self.num_threads, self._throttled_ns - throttled_ns))

    def _look(self) -> int:
        """Look at what Linux tells of the process. Return the delays of the threads that worked since the last look."""
        self._looked_ns = self._clock_ns()
        before, self._others = self._others, {name: _read(self._statistics(name)) for name in self._others}
        ran = {thread: now[0] - before[thread][0] for thread, now in self._others.items()}
        least_ns = max(1.0, WORKING * max(ran.values(), default=0))
        working = [thread for thread, ns in ran.items() if ns >= least_ns]
        self.num_threads = len(working) + 1
        self._num_faults = self._page_faults()
        self._throttled_ns = _throttled_ns(self._throttling)
        return sum(self._others[thread][1] - before[thread][1] for thread in working)

    def _find_others(self) -> None:
        """Find the threads that Python does not know: those of native code."""
        try:
            names = set(os.listdir(self._tasks))
        except OSError:
            names = set()
        names -= {str(thread.native_id) for thread in threading.enumerate()}
        known = self._others
        self._others = {name: known.get(name) or _read(self._statistics(name)) for name in names}

    def _statistics(self, thread: str) -> Path:
        return self._tasks / thread / "schedstat"


def _read(path: Path) -> tuple[int, int]:
    """Return for how long a thread was on a core, and for how long it was ready to be. Nothing, if it has ended, or if
    Linux does not tell."""
    try:
        return _numbers(_content(path))
    except (OSError, ValueError):
        return 0, 0


def _numbers(content: bytes) -> tuple[int, int]:
    ran_ns, delay_ns, *_ = content.split()
    return int(ran_ns), int(delay_ns)


def _content(path: Path) -> bytes:
    """Return what a small file has, in a third of the time of `path.read_bytes`."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1000)
    finally:
        os.close(file)


def throttling_file(cgroups: Path = CGROUPS, root: Path = CGROUP_ROOT) -> Path | None:
    """Return where Linux tells for how long a CPU limit has stopped this process, if it tells."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "cpu" if controllers else root
        found = folder / path.lstrip("/") / "cpu.stat"
        if found.exists():
            return found
    return None


def _throttled_ns(path: Path | None) -> int:
    """Return for how long a CPU limit has stopped the process: of version 2 of cgroups in µs, of version 1 in ns."""
    if path is None:
        return 0
    try:
        numbers = dict(line.split() for line in _content(path).splitlines())
    except (OSError, ValueError):
        return 0
    return int(numbers.get(b"throttled_usec", 0)) * 1000 + int(numbers.get(b"throttled_time", 0))
