"""`LiveSamples` keeps a sample per second of the last minutes for the live page: increases of series, and numbers of
the engine.

Samples are made even while the page is not open, so that it shows the recent past when it is opened. A sample costs the
telemetry thread less than a tenth of a millisecond. This module knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import Outcome
from oaiserve.facts.times import EpochOffset
from oaiserve.telemetry import names
from oaiserve.telemetry.request_series import RequestSeries
from oaiserve.telemetry.series import NS_PER_SECOND

MOST_SAMPLES = 300
MOST_CLIENTS = 20  # the most clients whose costs are shown, by cost
# The telemetry thread wakes up once a second, sometimes slightly early by this clock.
INTERVAL_NS = 950_000_000

HISTOGRAMS = {
    "time_to_first_token": names.TIME_TO_FIRST_TOKEN_SECONDS,
    "inter_token": names.INTER_TOKEN_LATENCY_SECONDS,
    "duration": names.DURATION_SECONDS,
}

Sample = dict[str, Any]
Totals = Mapping[Any, int]


class LiveSamples:
    """A ring of samples ready for JSON. The telemetry thread writes it under the lock of the series; any thread may
    read it.

    Numbers of requests and tokens are increases since the previous sample; histograms are pairs of a bucket's index and
    its increase.
    """

    def __init__(self, series: RequestSeries, epoch_offset_ns: EpochOffset, clock_ns: Callable[[], int]) -> None:
        self._epoch_offset_ns = epoch_offset_ns
        self._clock_ns = clock_ns
        self._last_ns = clock_ns()
        self._num_made = 0
        self.ring: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._series = series
        self._distributions = {name: series.distributions[metric] for name, metric in HISTOGRAMS.items()}
        self._before: dict[str, Totals] = {}
        self._last_costs: list[tuple[str, int, int, int, float]] = []

    @property
    def boundaries_seconds(self) -> dict[str, list[float]]:
        """Return the boundaries of each distribution's buckets. One further bucket holds the values above all of
        them."""
        return {
            name: [bound / distribution.per_unit for bound in distribution.boundaries]
            for name, distribution in self._distributions.items()
        }

    def costs(self) -> list[tuple[str, int, int, int, float]]:
        """Return, as of the last sample, each client's name, its engine time, CPU time and time alone, in ns, and its
        price."""
        return self._last_costs

    def add(self, snapshot: Callable[[], EngineNumbers]) -> None:
        """Make a sample if about a second has passed since the previous one."""
        now_ns = self._clock_ns()
        elapsed_ns = now_ns - self._last_ns
        if elapsed_ns < INTERVAL_NS:
            return
        self._last_ns = now_ns
        self._num_made += 1
        now = snapshot()
        totals = self._totals()
        self._last_costs = self._costs()
        increases: dict[str, Totals] = {}
        for name, total in totals.items():
            before = self._before.get(name, {})
            increases[name] = {key: new - before.get(key, 0) for key, new in total.items() if new != before.get(key, 0)}
        self._before = totals
        self.ring.append(
            {
                "number": self._num_made,
                "at_unix_ms": (now_ns + self._epoch_offset_ns()) // 1_000_000,
                "seconds": elapsed_ns / NS_PER_SECOND,
                "running": now.num_running,
                "waiting": now.num_waiting,
                "tokenizing": now.num_tokenizing,
                "kv_usage": now.kv_usage,
                "kv_cached": now.blocks_reusable / max(1, now.blocks_total),
                "requests": increases["requests"],
                "generation_tokens": increases["generation_tokens"].get("all", 0),
                "computed_tokens": increases["computed_tokens"].get("all", 0),
                **{name: sorted(increases[name].items()) for name in HISTOGRAMS},
            }
        )

    def after(self, number: int) -> list[Sample]:
        """Return the samples with a higher number than `number`, oldest first. If the newest has a lower number, as
        after a restart of the server, return all."""
        samples = self.ring.copy()
        least = number if samples and samples[-1]["number"] >= number else 0
        return [sample for sample in samples if sample["number"] > least]

    def _totals(self) -> dict[str, Totals]:
        counters = self._series.counters
        requests = dict[str, int]()
        for (outcome, *_), number in counters[names.REQUESTS].values.items():
            requests[outcome] = requests.get(outcome, 0) + number
        steps = self._series.distributions[names.ENGINE_STEP_TOKENS].children.values()
        return {
            "requests": requests,
            "generation_tokens": {"all": sum(counters[names.GENERATION_TOKENS].values.values())},
            "computed_tokens": {"all": round(sum(child.total for child in steps))},
            **{name: self._buckets(name) for name in HISTOGRAMS},
        }

    def _costs(self) -> list[tuple[str, int, int, int, float]]:
        kinds = (names.COST_MACHINE_SECONDS, names.COST_CORE_SECONDS, names.COST_ALONE_SECONDS, names.COST_PRICE)
        machine, cores, alone, price = (self._series.counters[metric] for metric in kinds)
        paid = price.values
        clients = sorted(machine.values.items(), key=itemgetter(1), reverse=True)[:MOST_CLIENTS]
        return [
            (
                client[0],
                ns,
                cores.values.get(client, 0),
                alone.values.get(client, 0),
                paid.get(client, 0) / price.per_unit,
            )
            for client, ns in clients
        ]

    def _buckets(self, name: str) -> Totals:
        """Return the number of values in each bucket. Only finished requests count, because the durations of others
        mean little."""
        counts = [
            child.counts
            for labels, child in self._distributions[name].children.items()
            if name != "duration" or labels[0] == Outcome.FINISHED
        ]
        return {bucket: sum(column) for bucket, column in enumerate(zip(*counts, strict=True))}
