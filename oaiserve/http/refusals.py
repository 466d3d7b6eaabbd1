"""`Refusals` delays refusals and the answers to uploads, so that one client cannot use much of the CPU with them.

Each client has an account of the CPU time that these requests took. A part of it is free, and the rest is paid off at a
small share of one core. An answer waits until its client's account is paid off, but only for a moment. This file knows
neither requests nor sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

SHARE = 0.05  # share of a core for these requests of one client
FREE_NS = 20_000_000  # CPU time without any delay, which is enough for 13 to 40 refusals at once
MOST_DELAY_NS = 2_000_000_000
REFUSAL_NS = 500_000  # CPU time of the event loop for a small refused request, with its connection
RECORDED_NS = 1_000_000  # additional CPU time for a request that has a record and may have reached the engine
STORED_NS = 150_000  # additional CPU time for an upload that is stored
STORED_BYTE_NS = 2.0  # additional CPU time for each of its bytes, in the event loop and the store
UNREAD_NS = 0.2  # CPU time to discard a byte of a body that was refused unread
MOST_CLIENTS = 10_000  # maximum accounts; beyond it, the client with the oldest charge is dropped


class Refusals:
    """The accounts by client. Only the event loop calls `charge`; any thread may read `delay_ns`."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.delay_ns = 0  # total delay
        self._clock_ns = clock_ns
        self._paid_off_ns: OrderedDict[bytes, int] = OrderedDict()  # the time at which each account is paid off

    def charge(self, client: bytes, cpu_ns: float = 0) -> int:
        """Charge a client for a request that took `cpu_ns` in addition to REFUSAL_NS. Return how many nanoseconds to
        hold back the answer."""
        now_ns = self._clock_ns()
        free_ns = int(FREE_NS / SHARE)
        paid_off_ns = max(now_ns, self._paid_off_ns.pop(client, now_ns)) + int((REFUSAL_NS + cpu_ns) / SHARE)
        paid_off_ns = min(paid_off_ns, now_ns + free_ns + MOST_DELAY_NS)
        self._paid_off_ns[client] = paid_off_ns
        self._forget(now_ns)
        delay_ns = max(0, paid_off_ns - free_ns - now_ns)
        self.delay_ns += delay_ns
        return delay_ns

    def _forget(self, now_ns: int) -> None:
        while len(self._paid_off_ns) > MOST_CLIENTS or next(iter(self._paid_off_ns.values())) <= now_ns:
            self._paid_off_ns.popitem(last=False)
