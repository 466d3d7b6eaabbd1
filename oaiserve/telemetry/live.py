"""The last minutes, second by second, for those who watch: what was added to the series, and the engine's numbers.

It is kept whether somebody watches or not, so that who opens the page sees what has just been: a sample takes the
telemetry thread less than a tenth of a millisecond. Knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from oaiserve.record import Outcome
from oaiserve.telemetry.observations import Observations
from oaiserve.telemetry.series import NS_PER_SECOND, Counter, Distribution, LabelValues
from oaiserve.telemetry.snapshot import Snapshot, usage
from oaiserve.times import monotonic_ns

MOST_SAMPLES = 300
# The thread that samples wakes up once a second, now and then a little early by this clock.
INTERVAL_NS = 950_000_000

Sample = dict[str, Any]
Key = TypeVar("Key")


class Live:
    """Written by the telemetry thread under the lock of the series, read by any. Samples are ready for JSON.

    A sample has `number` (from 1 on), `at_unix_ms`, `seconds` since the one before, `running`, `waiting` and
    `tokenizing` requests, `kv_usage` and `kv_cached` (shares of the KV cache), and what these seconds added: `requests`
    that ended, by outcome; their `generation_tokens`; `computed_tokens` of the engine's steps; and
    `time_to_first_token`, `inter_token` and `duration` as pairs of a bucket and how many more are in it.
    """

    def __init__(
        self, observed: Observations, epoch_offset_ns: int, clock_ns: Callable[[], int] = monotonic_ns
    ) -> None:
        self._epoch_offset_ns = epoch_offset_ns
        self._clock_ns = clock_ns
        self._last_ns = clock_ns()
        self._num_made = 0
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._requests = _Increase(lambda: _by_first_label(observed.requests))
        self._generation = _Increase(lambda: {"all": sum(observed.generation_tokens.values.values())})
        self._computed = _Increase(
            lambda: {"all": round(sum(part.total for part in observed.step_tokens.observed.values()))}
        )
        self._distributions = {
            "time_to_first_token": observed.time_to_first_token,
            "inter_token": observed.inter_token_latency,
            "duration": observed.duration,
        }
        self._buckets = {
            "time_to_first_token": _Increase(lambda: _buckets(observed.time_to_first_token)),
            "inter_token": _Increase(lambda: _buckets(observed.inter_token_latency)),
            # Who left or was refused says little about how long an answer takes.
            "duration": _Increase(lambda: _buckets(observed.duration, outcome=Outcome.FINISHED)),
        }

    @property
    def boundaries_seconds(self) -> dict[str, list[float]]:
        """Of the buckets, by distribution. The last bucket has what is above all of them."""
        return {
            name: [bound / distribution.per_unit for bound in distribution.boundaries]
            for name, distribution in self._distributions.items()
        }

    def sample(self, snapshot: Callable[[], Snapshot]) -> None:
        """Makes one if it is time to."""
        now_ns = self._clock_ns()
        elapsed_ns = now_ns - self._last_ns
        if elapsed_ns < INTERVAL_NS:
            return
        self._last_ns = now_ns
        self._num_made += 1
        now = snapshot()
        self._samples.append(
            {
                "number": self._num_made,
                "at_unix_ms": (now_ns + self._epoch_offset_ns) // 1_000_000,
                "seconds": elapsed_ns / NS_PER_SECOND,
                "running": now.num_running,
                "waiting": now.num_waiting,
                "tokenizing": now.num_tokenizing,
                "kv_usage": usage(now),
                "kv_cached": now.blocks_reusable / max(1, now.blocks_total),
                "requests": self._requests.take(),
                "generation_tokens": self._generation.take().get("all", 0),
                "computed_tokens": self._computed.take().get("all", 0),
                **{name: sorted(increase.take().items()) for name, increase in self._buckets.items()},
            }
        )

    def after(self, number: int) -> list[Sample]:
        """Those that are newer than the one of that number, and still kept; oldest first."""
        return [sample for sample in self._samples.copy() if sample["number"] > number]


class _Increase(Generic[Key]):
    """What was added to totals since the last call, without what did not change."""

    def __init__(self, totals: Callable[[], Mapping[Key, int]]) -> None:
        self._totals = totals
        self._before: Mapping[Key, int] = {}

    def take(self) -> dict[Key, int]:
        before, self._before = self._before, self._totals()
        return {key: total - before.get(key, 0) for key, total in self._before.items() if total != before.get(key, 0)}


def _by_first_label(counter: Counter) -> dict[str, int]:
    totals: dict[str, int] = {}
    for labels, value in counter.values.items():
        totals[labels[0]] = totals.get(labels[0], 0) + value
    return totals


def _buckets(distribution: Distribution, outcome: str | None = None) -> dict[int, int]:
    """How many are in each bucket, over all labels; or over those of one outcome, which is the first label."""

    def is_shown(labels: LabelValues) -> bool:
        return outcome is None or labels[0] == outcome

    counts = [observed.counts for labels, observed in distribution.observed.items() if is_shown(labels)]
    return {bucket: sum(column) for bucket, column in enumerate(zip(*counts, strict=True))}
