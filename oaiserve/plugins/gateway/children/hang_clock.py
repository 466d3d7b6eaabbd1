"""`HangClock` counts for how long the process of a model has given no sign of life.

It counts looks, one per second, instead of reading a clock, so a suspend or a pause of this process adds one look at
most. A look doesn't count if the process waits for a CPU, or a debugger holds it.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.commands.server_process import Activity

LOOK_SECONDS = 1.0
# A start waits for disks, downloads, compilers and other processes, so it may do nothing for this many times as long.
IDLE_MULTIPLE = 20
LEAST_WORK_SECONDS = 0.1  # CPU time that shows that a start goes on


class HangClock:
    def __init__(self, activity: Callable[[], Activity], hang_seconds: float) -> None:
        """`activity` returns what the process does, and raises OSError once it has ended. After `hang_seconds` it is to
        be killed, unless they are 0."""
        self._activity = activity
        self._hang_seconds = hang_seconds
        self._before: Activity | None = None  # at the look before, or when a start last worked
        self.num_looks = 0  # without a sign of life
        self.is_over = False  # The process is to be killed.

    @property
    def seconds(self) -> float:
        return self.num_looks * LOOK_SECONDS

    @property
    def seconds_left(self) -> float:
        return max(0, self._hang_seconds - self.seconds)

    def began_to_serve(self) -> None:
        self._before = None
        self.num_looks = 0

    def look_at_server(self, *, is_hung: bool) -> bool:
        """Look at a process that serves, and return whether it is to be killed now. `is_hung` says that it gives no
        reports."""
        if not is_hung:
            self.began_to_serve()
            return False
        before = self._before
        self._before = now = self._activity()
        if not (now.is_traced or (before is not None and _lacks_cpu(before, now))):
            self.num_looks += 1
        return self._ends(self._hang_seconds)

    def look_at_start(self) -> bool:
        """Look at a process that starts, and return whether it is to be killed now. It gives no reports yet, so it
        hangs if it is stopped, or has used no CPU time for IDLE_MULTIPLE times as long."""
        now = self._activity()
        before = self._before
        if before is None or now.cpu_seconds - before.cpu_seconds >= LEAST_WORK_SECONDS:
            self.began_to_serve()
            self._before = now
        elif not (now.is_traced or now.is_runnable):
            self.num_looks += 1
        return self._ends(self._hang_seconds if now.is_stopped else IDLE_MULTIPLE * self._hang_seconds)

    def _ends(self, limit_seconds: float) -> bool:
        if self.is_over or not limit_seconds or self.seconds < limit_seconds:
            return False
        self.is_over = True
        return True


def _lacks_cpu(before: Activity, now: Activity) -> bool:
    """Return whether the main thread has work, but got a CPU for less than half of the time. On a busy machine its
    answers are only late."""
    return now.is_runnable and now.main_seconds - before.main_seconds < LOOK_SECONDS / 2
