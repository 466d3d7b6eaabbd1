"""Finds out from Linux's accounts which processes used the machine's cores while the engine waited for them.

Once a second, the watchdog's thread checks whether the engine has waited since the last check, and only then reads the
accounts of all processes. The first reading only serves as a base for the next one. Any thread may read the result.

A lower clock frequency of the cores makes steps longer without any wait, so it is also noted while steps take longer
than expected for unknown reasons.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from oaiserve.engine.accounts.core_clock import CoreClock
from oaiserve.facts.record import SLOW_CLOCK

TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")  # the unit of time in /proc
WAITED_NS = 50_000_000  # A check reads the accounts if the engine has waited for so long since the last check.
MOST_LOOKS = 300  # checks that are stored
MOST_USERS = 3  # users that are named
LEAST_SHARE = 0.05  # Users of a smaller share of a core are not named.

# Users of cores that are not visible processes
HIDDEN = "processes that have ended, or are outside of this container"
HOST = "the host of this virtual machine"
LIMIT = "the CPU limit of this container"
DISK = "reading from disk"


class _Accounts(NamedTuple):
    """Times in ticks, from the machine's start."""

    busy: int  # busy time of all cores
    stolen: int
    by_process: dict[int, tuple[str, int]]  # name and CPU time, keyed by process id
    throttled_ns: int
    num_faults: int


class _Look(NamedTuple):
    since_ns: int
    at_ns: int
    users_ns: dict[str, int]  # time of cores by user


class MachineUsers:
    """What used the machine while the engine waited for it, in the last few minutes."""

    def __init__(
        self,
        throttled_ns: Callable[[], int],
        num_faults: Callable[[], int],
        root: Path = Path("/"),
        own: int | None = None,
        *,
        clock_ns: Callable[[], int],
    ) -> None:
        """`throttled_ns` returns for how long the limit of its container has stopped the process so far, and
        `num_faults` the pages that it has waited for. `own` is its process id."""
        self._clock_ns = clock_ns
        self._throttled_ns = throttled_ns
        self._num_faults = num_faults
        self._proc = root / "proc"
        self._own = os.getpid() if own is None else own
        self._clock = CoreClock(root)
        self._last_waited_ns = self._last_unexplained_ns = 0
        self._last_look_ns = clock_ns()
        self._before: tuple[int, _Accounts] | None = None
        self._looks: tuple[_Look, ...] = ()

    def look(self, waited_ns: int, unexplained_ns: int = 0) -> None:
        """Check once. So far, the engine has waited for `waited_ns`, and its steps have taken `unexplained_ns` of
        unexplained time."""
        newly_ns = waited_ns - self._last_waited_ns
        newly_unexplained_ns = unexplained_ns - self._last_unexplained_ns
        self._last_waited_ns = waited_ns
        self._last_unexplained_ns = unexplained_ns
        now_ns = self._clock_ns()
        since_ns = self._last_look_ns
        self._last_look_ns = now_ns
        lost_share = self._clock.lost_share()
        if lost_share and newly_ns + newly_unexplained_ns > WAITED_NS:
            self._note(_Look(since_ns, now_ns, {SLOW_CLOCK: int(lost_share * (now_ns - since_ns))}))
        if newly_ns <= WAITED_NS:
            self._before = None
            return
        before = self._before
        try:
            accounts = self._read()
        except (OSError, ValueError, IndexError):  # There is no /proc, or its format differs.
            return
        self._before = now_ns, accounts
        if before is not None:
            self._note(_Look(before[0], now_ns, self._users_ns(before[1], accounts, newly_ns)))

    def _note(self, look: _Look) -> None:
        self._looks = (*self._looks[1 - MOST_LOOKS :], look)

    def between(self, since_ns: int, until_ns: int) -> dict[str, int]:
        """Return for how long each user used cores in this time, as far as it is covered by checks, the longest
        first."""
        sums = Counter[str]()
        covered_ns = 0
        for look in reversed(self._looks):  # Most times end now, and are covered by the last few.
            if look.at_ns <= since_ns:
                break
            overlap_ns = min(until_ns, look.at_ns) - max(since_ns, look.since_ns)
            if overlap_ns > 0:
                covered_ns += overlap_ns
                for user, ns in look.users_ns.items():
                    sums[user] += ns * overlap_ns // (look.at_ns - look.since_ns)
        return {user: ns for user, ns in sums.most_common(MOST_USERS) if ns > LEAST_SHARE * covered_ns}

    def _users_ns(self, before: _Accounts, now: _Accounts, waited_ns: int) -> dict[str, int]:
        ticks = Counter[str]()
        seen = 0
        for number, (name, total) in now.by_process.items():
            used = total - before.by_process.get(number, (name, total))[1]
            seen += used
            if number != self._own:
                ticks[f"{name} (process {number})"] += used
        ticks[HIDDEN] = max(0, now.busy - before.busy - seen)
        ticks[HOST] = now.stolen - before.stolen
        users_ns = {user: number * TICK_NS for user, number in ticks.items() if number}
        users_ns[LIMIT] = now.throttled_ns - before.throttled_ns
        if now.num_faults > before.num_faults:  # The system doesn't report for how long.
            users_ns[DISK] = waited_ns
        return users_ns

    def _read(self) -> _Accounts:
        with open(self._proc / "stat", "rb") as file:
            user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, file.readline().split()[1:])
        by_process = {}
        for name in os.listdir(self._proc):
            if name.isdecimal():
                try:
                    content = (self._proc / name / "stat").read_text(errors="replace")
                except OSError:  # It has ended.
                    continue
                command, _, rest = content.partition("(")[2].rpartition(")")
                fields = rest.split()
                by_process[int(name)] = command, int(fields[11]) + int(fields[12])
        busy = user + nice + system + irq + softirq
        return _Accounts(busy, stolen, by_process, self._throttled_ns(), self._num_faults())
