"""`Figures` are what a simulated fleet comes to: times, hits, balance and cost."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.fleet.traffic import Call

_BUCKETS = 32  # of a histogram for each doubling


class Histogram:
    """Numbers of times by the logarithm of their length, to 2 %."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float, number: int) -> None:
        if number:
            self.counts[int(math.log2(seconds) * _BUCKETS)] += number

    def percentile(self, share: float) -> float:
        """Return the time below which so large a share of all is, in seconds."""
        wanted = share * self.counts.total()
        for bucket in sorted(self.counts):
            wanted -= self.counts[bucket]
            if wanted <= 0:
                return float(2 ** (bucket / _BUCKETS))
        return math.nan


@dataclass
class Figures:
    """The figures of one policy, of the requests that arrived after the warm-up."""

    policy: str
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    ttfts: array[float] = field(default_factory=lambda: array("d"))  # seconds, in the same order
    itl: Histogram = field(default_factory=Histogram)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    answer_tokens: int = 0
    work_seconds: Sequence[float] = ()  # of each replica: in steps, without the constant part of each
    always_there: slice = field(default_factory=lambda: slice(None))  # the replicas that neither fail nor are replaced
    num_lost: int = 0  # requests that a replica took with it
    num_unfinished: int = 0  # requests that had no first token at the end
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the simulation

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """The work of the busiest replica, by that of the mean one."""
        work = self.work_seconds[self.always_there]
        return max(work) / statistics.mean(work)

    @property
    def work(self) -> float:
        """The seconds of work, of all replicas together, for a million tokens of prompts and answers."""
        return sum(self.work_seconds) / max(1, self.prompt_tokens + self.answer_tokens) * 1e6

    def count(self, call: Call) -> None:
        """Count a request that has finished, or has a first token at the end."""
        self.arrivals.append(call.arrival)
        self.ttfts.append(call.ttft)
        self.prompt_tokens += call.num_tokens
        self.hit_tokens += call.hit_tokens
        self.answer_tokens += call.answer

    def count_waiting(self, call: Call, now: float) -> None:
        """Count a request that has no first token at the end. It has waited so long at least, and nothing that it costs
        or saves is known."""
        self.arrivals.append(call.arrival)
        self.ttfts.append(now - call.arrival)
        self.num_unfinished += 1

    def ttft(self, percent: float, between: tuple[float, float] = (0, math.inf)) -> float:
        """Return a percentile of the times to the first token, of the requests that arrived between two times."""
        arrivals, ttfts = np.array(self.arrivals), np.array(self.ttfts)
        return float(np.percentile(ttfts[(arrivals >= between[0]) & (arrivals < between[1])], percent))

    def over_time(self, percent: float, seconds: float = 1.0) -> list[tuple[float, float]]:
        """Return a percentile of the times to the first token, by the time of arrival."""
        arrivals, ttfts = np.array(self.arrivals), np.array(self.ttfts)
        parts = (arrivals / seconds).astype(int)
        return [
            (float((part + 0.5) * seconds), float(np.percentile(ttfts[parts == part], percent)))
            for part in np.unique(parts)
        ]
