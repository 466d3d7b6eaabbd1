"""`RefusedLines` decides when the next line of an owner's batches may begin after some of its lines were refused.

A refused line takes CPU time, but none of the engine's, so no turns of the engine hold back the next one. While other
clients have open requests, the lines of an owner that had one refused begin one after the other, so that refusing them
takes SHARE of a core. A second after the last refused line, they begin without pauses again. This file knows neither
requests nor the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oaiserve.http.refusals import MOST_DELAY_NS, SHARE

# CPU time of all threads for a small refused line, with its record and its stored answer: 863 µs for each of 3,000
# lines on a server without other work. With the SHARE of refusals over HTTP, 55 such lines a second begin next to
# requests of others, and 50,000 take a quarter of an hour; alone, they take 80 s.
LINE_NS = 900_000
FORGET_NS = 1_000_000_000  # time after its last refused line until an owner's lines begin without pauses again


@dataclass(slots=True)
class _Account:
    paid_off_ns: int  # No line begins before this time.
    refused_ns: int  # time of the last refused line


class RefusedLines:
    """The accounts by owner. An owner without a recently refused line has none. Only the event loop uses them."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._accounts: dict[str, _Account] = {}

    def wait_ns(self, owner: str) -> int:
        """Return in how many nanoseconds the owner's next line may begin, at most MOST_DELAY_NS."""
        account = self._accounts.get(owner)
        if account is None:
            return 0
        now_ns = self._clock_ns()
        if now_ns >= max(account.paid_off_ns, account.refused_ns + FORGET_NS):
            del self._accounts[owner]
        return max(0, account.paid_off_ns - now_ns)

    def begin(self, owner: str) -> int:
        """Note that a line begins. Return the CPU time in nanoseconds that it is charged with, in case it is refused,
        too."""
        account = self._accounts.get(owner)
        if account is None:
            return 0
        self._charge(account, LINE_NS)
        return LINE_NS

    def refuse(self, owner: str, cpu_ns: int, charged_ns: int) -> None:
        """Charge an owner for a refused line that took `cpu_ns` in addition to LINE_NS. `charged_ns` is what `begin`
        has returned for it."""
        now_ns = self._clock_ns()
        account = self._accounts.setdefault(owner, _Account(now_ns, now_ns))
        account.refused_ns = now_ns
        self._charge(account, LINE_NS + cpu_ns - charged_ns)

    def _charge(self, account: _Account, cpu_ns: int) -> None:
        now_ns = self._clock_ns()
        account.paid_off_ns = min(max(now_ns, account.paid_off_ns) + int(cpu_ns / SHARE), now_ns + MOST_DELAY_NS)
