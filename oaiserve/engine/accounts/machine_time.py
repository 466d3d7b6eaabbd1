"""How long the engine was ready to run without running, according to Linux's accounts.

It is read after a long step or a long gap. Delays of native threads, page faults and the cgroup's CPU limit are read
only after a step that was much too slow. Accounts missing in the system count as 0. Only the file of the engine thread
stays open: other threads come and go.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from oaiserve.system_cgroups import cgroups

TASKS = Path("/proc/self/task")
LOOK_NS = 1_000_000_000  # time after which the threads are checked again
FIND_NS = 5_000_000_000  # time after which the threads are listed again
MOST_VAIN = 20  # After this many checks in a row without a working native thread, the next waits for LOOK_NS.
ENOUGH_NS = 5_000_000  # least work between two checks that shows how many threads share it
WORKING = 0.25  # A thread works if it ran for this share of the time of the busiest thread.


class MachineTime:
    """The delays of the thread that calls this first, and of the native threads that share its work."""

    def __init__(
        self,
        tasks: Path = TASKS,
        throttling: Path | None = None,
        page_faults: Callable[[], int] = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        *,
        clock_ns: Callable[[], int],
    ) -> None:
        """`page_faults` returns the number of pages for which the process has waited while a disk was read."""
        self._tasks = tasks
        self._throttling = throttling
        self._page_faults = page_faults
        self._clock_ns = clock_ns
        self._own: int | None = None  # the open file of the calling thread; None: it has not called yet
        # Threads that share a step's work: the calling one, and those of native code that worked recently. While the
        # calling thread works or waits for a core, `parallelism` threads do so on average.
        self.num_threads = 1
        self.parallelism = 1.0
        self._num_vain = 0  # checks in a row, up to the last one, that found no working native thread
        self._looked_own = (0, 0)  # the calling thread's time on a core, and its delay, at the last check
        self._delay_ns = 0
        self._others: dict[str, tuple[int, int]] = {}  # by thread: its time on a core, and its delay
        self._looked_ns = self._found_ns = -2 * FIND_NS
        self._num_faults = 0
        self._throttled_ns = 0

    def delay_ns(self) -> int:
        """Return for how long the calling thread was ready to run without running since the last call."""
        if self._own is None:
            self._own = self._opened(str(threading.get_native_id()))
            self._looked_own = self._own_times(self._own)
            self._delay_ns = self._looked_own[1]
        now_ns = self._clock_ns()
        if now_ns - self._found_ns > FIND_NS:
            self._found_ns = now_ns
            try:
                names = set(os.listdir(self._tasks))
            except OSError:
                names = set()
            names -= {str(thread.native_id) for thread in threading.enumerate()}  # leaves the threads of native code
            known = self._others
            self._others = {name: known.get(name) or _read(self._statistics(name)) for name in names}
        if now_ns - self._looked_ns > LOOK_NS or 0 < self._num_vain < MOST_VAIN:
            self._look()
        before_ns = self._delay_ns
        self._delay_ns = self._own_times(self._own)[1]
        return self._delay_ns - before_ns

    def _opened(self, thread: str) -> int:
        """Open the statistics of a thread until this object is gone. Return the file, or -1 if there is none."""
        try:
            file = os.open(self._statistics(thread), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        weakref.finalize(self, os.close, file)
        return file

    def _own_times(self, file: int) -> tuple[int, int]:
        try:
            return _numbers(os.pread(file, 100, 0))
        except (OSError, ValueError):
            return 0, self._delay_ns

    def more_ns(self, most_ns: int) -> int:
        """Return the part of a step's excess `most_ns` due to delays of other threads.

        It is the mean delay of the working native threads, or the time in which the limit of a cgroup stopped the
        process. The length of a page fault is unknown, so after one, the whole excess counts as the machine's.
        """
        num_faults = self._num_faults
        throttled_ns = self._throttled_ns
        delay_ns = self._look()
        if self._num_faults > num_faults:
            return most_ns
        return min(most_ns, max(delay_ns // self.num_threads, self._throttled_ns - throttled_ns))

    def _look(self) -> int:
        """Read Linux's accounts of the process. Return the delays of the working threads since the last check."""
        self._looked_ns = self._clock_ns()
        before = self._others
        self._others = {name: _read(self._statistics(name)) for name in self._others}
        ran = {thread: now[0] - before[thread][0] for thread, now in self._others.items()}
        least_ns = max(1.0, WORKING * max(ran.values(), default=0))
        working = [thread for thread, ns in ran.items() if ns >= least_ns]
        self.num_threads = len(working) + 1
        self._num_vain = 0 if working else self._num_vain + 1
        own_before = self._looked_own
        self._looked_own = now = self._own_times(-1 if self._own is None else self._own)
        if (own_ns := sum(now) - sum(own_before)) >= ENOUGH_NS:
            others_ns = sum(sum(self._others[thread]) - sum(before[thread]) for thread in working)
            self.parallelism = 1 + min(len(working), others_ns / own_ns)
        self._num_faults = self.num_faults()
        self._throttled_ns = self.throttled_ns()
        return sum(self._others[thread][1] - before[thread][1] for thread in working)

    def num_faults(self) -> int:
        """Return the number of pages for which the process has waited so far."""
        return self._page_faults()

    def throttled_ns(self) -> int:
        """Return the time for which a CPU limit has stopped the process so far."""
        return _throttled_ns(self._throttling)

    def _statistics(self, thread: str) -> Path:
        return self._tasks / thread / "schedstat"


def _read(path: Path) -> tuple[int, int]:
    """Return the time of a thread on a core, and its time of waiting for one: 0 if it has ended."""
    try:
        return _numbers(_content(path))
    except (OSError, ValueError):
        return 0, 0


def _numbers(content: bytes) -> tuple[int, int]:
    ran_ns, delay_ns, *_ = content.split()
    return int(ran_ns), int(delay_ns)


def _content(path: Path) -> bytes:
    """Return the content of a small file, in a third of the time of `path.read_bytes`."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1000)
    finally:
        os.close(file)


def throttling_file(root: Path = Path("/")) -> Path | None:
    """Return the file with the time for which a CPU limit has stopped this process, or None.

    It belongs to the innermost cgroup whose folder exists. `root` is the folder that has proc/ and sys/.
    """
    found = [one for one in cgroups("cpu", root) if (one.folder / "cpu.stat").exists()]
    # Where version 1 limits CPUs, version 2 doesn't.
    return next((one.folder / "cpu.stat" for one in reversed(found) if one.version == found[0].version), None)


def _throttled_ns(path: Path | None) -> int:
    """Return the time for which a CPU limit has stopped the process: cgroups count µs in version 2, ns in version 1."""
    if path is None:
        return 0
    try:
        numbers = dict(line.split() for line in _content(path).splitlines())
    except (OSError, ValueError):
        return 0
    return int(numbers.get(b"throttled_usec", 0)) * 1000 + int(numbers.get(b"throttled_time", 0))
