"""Who was at an engine while a request waited for its first byte, and how that divides the wait.

From outside, it is known when each request was sent, when its first byte came, and when its last one. The rest is an
estimate: the engine reports what a request would have taken alone, or requests that ran alone show it, and what
it waited beyond that goes to the others that were at the engine at the same time. Event loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from oaiserve.facts.record import FURTHER_CLIENTS, OthersTime, Whose
from oaiserve.plugins.gateway.engines.times import PassedTimes

MOST_GONE = 512  # requests to remember that have ended, because an open one may have waited for them
MOST_NAMED = 8  # clients in an account; the rest counts as one with a key, and one without
LEAST_LEARNT = 5  # After this many requests that ran alone, their time counts as known.
LEAST_PART = 0.01  # smallest share of a wait for which another request is counted; its time always is
FADING = 0.98  # weight of a request that ran alone, relative to the next one


@dataclass(slots=True, eq=False)
class Presence:
    """A request at an engine."""

    client: str  # the name of its key, or its address if it has none
    name: str | None  # name of the client's key, which operators may see
    times: PassedTimes = field(default_factory=PassedTimes)
    left_ns: int = 0  # when the request left the engine


class Behind(NamedTuple):
    """The requests of one client that were at the engine while another client's request waited, and their times."""

    whose: Whose
    name: str | None
    num_prompts: int  # requests that had arrived before and had no byte of their answer yet
    num_answers: int  # requests whose answer was being written
    prompts_ns: int
    answers_ns: int

    @property
    def total_ns(self) -> int:
        return self.prompts_ns + self.answers_ns

    def scaled(self, share: float) -> OthersTime:
        return OthersTime(self.whose, self.name, int(self.prompts_ns * share), int(self.answers_ns * share), 0)


@dataclass(slots=True)
class Line:
    """The time of a prompt that is computed alone, as a linear function of its tokens, fitted to recent prompts."""

    number: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, tokens: int, ns: int) -> None:
        self.number += 1
        now = (1.0, float(tokens), float(ns), float(tokens) ** 2, float(tokens) * ns)
        self._sums = [FADING * before + new for before, new in zip(self._sums, now, strict=True)]

    def at(self, tokens: int) -> int | None:
        """Return the expected time in nanoseconds, or None if too little is known."""
        if self.number < LEAST_LEARNT:
            return None
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        slope = max(0.0, (weight * xy - x * y) / spread) if spread > 1e-6 * xx * weight else 0.0
        return max(0, int((y - slope * x) / weight + slope * tokens))


class Presences:
    """The open requests at one engine, and the latest ones that have ended."""

    def __init__(self) -> None:
        self.open: dict[Presence, None] = {}
        self._gone: deque[Presence] = deque(maxlen=MOST_GONE)  # latest first
        self.alone = Line()

    def enter(self, presence: Presence) -> None:
        self.open[presence] = None

    def leave(self, presence: Presence, now_ns: int) -> None:
        presence.left_ns = now_ns
        del self.open[presence]
        self._gone.appendleft(presence)

    def drop(self, presence: Presence) -> None:
        """Forget a request that the engine has not answered."""
        self.open.pop(presence, None)

    def behind(self, own: Presence) -> tuple[list[Behind], int]:
        """Return the clients whose requests were there while a request waited for its first byte, sorted by their total
        time, longest first. Also return the time during which any of them was there. The first byte has arrived."""
        since_ns = own.times.sent or 0
        until_ns = own.times.first_byte or 0
        found: dict[tuple[str, str | None], list[int]] = {}
        spans: list[tuple[int, int]] = []
        for other in (*self.open, *takewhile(lambda gone: gone.left_ns > since_ns, self._gone)):
            sent_ns = other.times.sent
            if other is own or sent_ns is None:
                continue
            first_ns = other.times.first_byte or until_ns
            end_ns = other.times.last_token or until_ns
            prompt = (max(since_ns, sent_ns), min(until_ns, first_ns)) if sent_ns <= since_ns else (0, 0)
            answer = (max(since_ns, first_ns), min(until_ns, end_ns))
            for place, (begin, end) in enumerate((prompt, answer)):
                if end > begin:
                    sums = found.setdefault((other.client, other.name), [0, 0, 0, 0])
                    sums[place] += end - begin >= LEAST_PART * (until_ns - since_ns)
                    sums[2 + place] += end - begin
                    spans.append((begin, end))
        listed = [
            Behind(Whose.SAME_CLIENT if client == own.client else Whose.OTHER_CLIENT, name, *sums)
            for (client, name), sums in found.items()
        ]
        return _first_ones(listed), _covered(spans)


def divided(behind: Sequence[Behind], waited_ns: int) -> list[OthersTime]:
    """Divide the time that a request waited for others in proportion to the time that they were there."""
    share = waited_ns / max(1, sum(one.total_ns for one in behind))
    return [one.scaled(share) for one in behind]


def _first_ones(listed: list[Behind]) -> list[Behind]:
    """Return the clients with the most time, and the rest as two: all with a key, and all without."""
    listed.sort(key=attrgetter("total_ns"), reverse=True)
    found = listed[:MOST_NAMED]
    rest = listed[MOST_NAMED:]
    for name, others in (
        (FURTHER_CLIENTS, [one for one in rest if one.name is not None]),
        (None, [one for one in rest if one.name is None]),
    ):
        if others:
            sums = [sum(column) for column in zip(*(one[2:] for one in others), strict=True)]
            found.append(Behind(Whose.OTHER_CLIENT, name, *sums))
    return found


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return the time that any of these spans covers."""
    covered = 0
    last = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered
