"""Checks what a soak has found, and makes its tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from oaiserve.facts.record import Outcome
from oaiserve.telemetry import names
from tools.soak.server import Sample

MOST_RSS_MIB_PER_MINUTE = 2.0
MOST_RSS_MIB = 16.0  # in all of the second half, however long it is
SPAN_RESULTS = ("ended", "exported", "failed", "dropped")
LEAST_SECONDS_FOR_TRENDS = 60.0  # of the second half; a shorter one still has first times


@dataclass
class SoakRun:
    """The observations of the clients and the samples.

    The first sample is from before the clients, the last from after them. These two have their pages of metrics.
    """

    samples: list[Sample]
    num_sent: int
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)  # how often each was brought about
    num_excused: int = 0  # requests that failed while a fault allowed it

    def gained(self, metric: names.Metric, **labels: str) -> int:
        return int(self.samples[-1].total(metric, **labels) - self.samples[0].total(metric, **labels))

    @property
    def is_settled(self) -> bool:
        before, after = self.samples[0], self.samples[-1]
        is_empty = after.num_in_engine == 0 and after.blocks_used == 0 and after.num_fds <= before.num_fds
        return is_empty and self.gained(names.REQUESTS) == self.num_sent and self.num_spans_under_way == 0

    @property
    def num_spans_under_way(self) -> int:
        """The number of spans that have ended, and are neither exported nor counted as lost."""
        ended, *others = (self.gained(names.SPANS, result=result) for result in SPAN_RESULTS)
        return ended - sum(others)

    @property
    def first_half(self) -> list[Sample]:
        return self.samples[: len(self.samples) // 2]

    @property
    def second_half(self) -> list[Sample]:
        return self.samples[len(self.samples) // 2 :]

    @property
    def is_long_enough_for_trends(self) -> bool:
        second = self.second_half
        return second[-1].at_seconds - second[0].at_seconds >= LEAST_SECONDS_FOR_TRENDS

    @property
    def rss_mib_per_minute(self) -> float:
        """The slope in the second half, by least squares."""
        seconds = [sample.at_seconds for sample in self.second_half]
        return 60 * statistics.linear_regression(seconds, [sample.rss_mib for sample in self.second_half]).slope

    @property
    def most_rss_mib_per_minute(self) -> float:
        seconds = self.second_half[-1].at_seconds - self.second_half[0].at_seconds
        return min(MOST_RSS_MIB_PER_MINUTE, 60 * MOST_RSS_MIB / seconds)

    @property
    def new_label_values(self) -> set[tuple[str, str]]:
        """The label values that are new in the second half. A new series of known values is fine: it may be rare."""
        known = set().union(*(sample.label_values for sample in self.first_half))
        return set().union(*(sample.label_values for sample in self.second_half)) - known


def checks(run: SoakRun) -> Iterator[tuple[bool, str]]:
    """Yield whether each check holds, and the sentence to print if it does not."""
    before, after, num_accounted = run.samples[0], run.samples[-1], run.gained(names.REQUESTS)
    first_problem = "".join(run.problems[:1])
    yield not run.problems, f"{len(run.problems)} requests went wrong, the first one: {first_problem}"
    yield after.num_in_engine == 0, f"{after.num_in_engine} requests are still there, though no client is."
    yield after.blocks_used == 0, f"{after.blocks_used} KV blocks are in use, though no request is there."
    yield (
        num_accounted == run.num_sent,
        f"{run.num_sent} requests reached a generation route, but {names.REQUESTS.name} grew by {num_accounted}.",
    )
    yield (
        after.num_fds <= before.num_fds,
        f"{after.num_fds} file descriptors are open; before the clients came there were {before.num_fds}.",
    )
    yield run.num_spans_under_way == 0, f"{run.num_spans_under_way} spans are neither exported nor counted as lost."
    num_errors = run.gained(names.TELEMETRY_ERRORS)
    yield num_errors == 0, f"{names.TELEMETRY_ERRORS.name} grew by {num_errors}."
    if run.is_long_enough_for_trends:
        new, slope, most = run.new_label_values, run.rss_mib_per_minute, run.most_rss_mib_per_minute
        yield not new, f"In the second half labels took values that they had not had before: {sorted(new)}."
        yield (
            slope <= most,
            f"In the second half memory grew by {slope:.2f} MiB a minute; {most:.2f} is the limit.",
        )


def failures(run: SoakRun) -> list[str]:
    return [sentence for holds, sentence in checks(run) if not holds]


def report(run: SoakRun) -> str:
    """Return the tables, in markdown."""
    samples, half = run.samples, len(run.samples) // 2

    def course(name: str, values: Sequence[float]) -> str:
        return f"| {name} | {values[0]:,.0f} | {values[half]:,.0f} | {max(values):,.0f} | {values[-1]:,.0f} |"

    num_bad = sum(number for kind, number in run.kinds.items() if kind.startswith("bad"))
    kinds = sorted((kind, number) for kind, number in run.kinds.items() if not kind.startswith("bad"))
    sums = [
        ("requests that reached a generation route", run.num_sent),
        (f"requests in `{names.REQUESTS.name}`", run.gained(names.REQUESTS)),
        *((f"... {outcome}", run.gained(names.REQUESTS, outcome=outcome)) for outcome in Outcome),
        ("tokens generated", run.gained(names.GENERATION_TOKENS)),
        ("preemptions", run.gained(names.ENGINE["num_preemptions"])),
        *((f"client: {kind}", number) for kind, number in [*kinds, ("bad request", num_bad)]),
        *((f"fault: {fault}", number) for fault, number in run.faults.items()),
        *([("requests that failed while descriptors were short", run.num_excused)] if run.faults else []),
        *((f"spans {result}", run.gained(names.SPANS, result=result)) for result in SPAN_RESULTS if run.faults),
        *((f"answers with {status}", number) for status, number in sorted(run.statuses.items())),
    ]
    threads = [sample.num_threads for sample in samples if sample.num_threads is not None]
    return "\n".join(
        [
            "| | before | half time | most | after |",
            "|---|---|---|---|---|",
            course("RSS, MiB", [sample.rss_mib for sample in samples]),
            course("open file descriptors", [sample.num_fds for sample in samples]),
            *([course("threads", threads)] if threads else []),
            course("series on `/metrics`", [sample.num_series for sample in samples]),
            course("label values on `/metrics`", [len(sample.label_values) for sample in samples]),
            course("sequences running", [sample.num_running for sample in samples]),
            course("sequences waiting", [sample.num_waiting for sample in samples]),
            course("KV blocks used", [sample.blocks_used for sample in samples]),
            "",
            "| | |",
            "|---|---|",
            f"| RSS in the second half, MiB a minute | {run.rss_mib_per_minute:+.2f} |",
            *(f"| {name} | {number:,} |" for name, number in sums),
        ]
    )
