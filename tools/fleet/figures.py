"""What a simulated fleet comes to: times, hits, balance and cost."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
    arrivals: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)  # seconds, in the same order
    itl: Histogram = field(default_factory=Histogram)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    answer_tokens: int = 0
    busy_seconds: Sequence[float] = ()  # of each replica
    computed_tokens: Sequence[int] = ()
    reasons: Counter[str] = field(default_factory=Counter)
    num_lost: int = 0  # requests that a replica took with it
    num_unfinished: int = 0  # requests that had no first token at the end
    seconds: float = 0.0
    choose_us: float = 0.0  # real time of the policy for each request
    real_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """The busiest replica's time in steps, by that of the mean."""
        return max(self.busy_seconds) / statistics.mean(self.busy_seconds)

    @property
    def imbalance_of_tokens(self) -> float:
        return max(self.computed_tokens) / statistics.mean(self.computed_tokens)

    @property
    def utilization(self) -> float:
        return statistics.mean(self.busy_seconds) / self.seconds

    @property
    def cost(self) -> float:
        """Replica seconds, of those in which steps ran, for a million tokens of prompts and answers."""
        return sum(self.busy_seconds) / (self.prompt_tokens + self.answer_tokens) * 1e6

    def ttft(self, percent: float) -> float:
        return float(np.percentile(self.ttfts, percent))

    def over_time(self, percent: float, seconds: float = 1.0) -> list[tuple[float, float]]:
        """Return a percentile of the times to the first token, by the time of arrival."""
        arrivals, ttfts = np.array(self.arrivals), np.array(self.ttfts)
        parts = (arrivals / seconds).astype(int)
        return [
            (float((part + 0.5) * seconds), float(np.percentile(ttfts[parts == part], percent)))
            for part in np.unique(parts)
        ]
