"""The samples of all replicas added up, second by second, for the charts of the gateway's live page.

The gateway requests samples only while the page is open. Replicas' clocks may differ, so samples are matched by their
age on arrival.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any

import msgspec

from oaiserve.facts.record import Outcome
from oaiserve.plugins.gateway.sources import UNREADABLE
from oaiserve.plugins.gateway.upstream import NoAnswer, Upstream
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.telemetry.samples import HISTOGRAMS, MOST_SAMPLES
from oaiserve.wire.report import Count, Load, Seconds

MOST_BYTES = 2**20  # size of a replica's samples
ASK_SECONDS = 2.0  # time limit for a replica's answer
IDLE_NS = 5_000_000_000  # after this time without a viewer, the past minutes are requested again
MOST_BUCKETS = 1000

_Bucket = tuple[Annotated[int, msgspec.Meta(ge=0, lt=MOST_BUCKETS)], Count]
_Buckets = Annotated[list[_Bucket], msgspec.Meta(max_length=MOST_BUCKETS)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Sample(msgspec.Struct):
    """A second of one server, as `LiveSamples` makes it, or of all servers. Counts are increases within this second."""

    number: Count
    at_unix_ms: Count
    seconds: Seconds
    running: Count
    waiting: Count
    tokenizing: Count
    kv_usage: _Share
    kv_cached: _Share
    requests: dict[Outcome, Count]
    generation_tokens: Load
    computed_tokens: Load
    time_to_first_token: _Buckets
    inter_token: _Buckets
    duration: _Buckets


class Samples(msgspec.Struct):
    """The answer of /debug/samples."""

    boundaries_seconds: dict[str, Annotated[list[float], msgspec.Meta(max_length=MOST_BUCKETS)]]
    samples: Annotated[list[Sample], msgspec.Meta(max_length=MOST_SAMPLES)]


_decode = msgspec.json.Decoder(Samples).decode


Get = Callable[[str], Awaitable[tuple[int, bytes]]]  # returns the status and the body for a path. Raises NoAnswer.


class FleetSamples:
    """The last minutes of all replicas together. Event loop only."""

    def __init__(self, replicas: Callable[[], Mapping[str, Get]], clock_ns: Callable[[], int]) -> None:
        """`replicas` returns the current ones by name."""
        self._replicas = replicas
        self._clock_ns = clock_ns
        self._last: dict[str, Sample] = {}  # keyed by replica
        self._asked_ns: int | None = None
        self._number = 0
        self._asking = asyncio.Lock()
        self.samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self.boundaries_seconds: dict[str, list[float]] = {name: [] for name in HISTOGRAMS}

    async def look(self, now_unix_ms: int) -> None:
        """Request the samples since the last call from all replicas, and add them up. The first call, and any after a
        long pause, begin with the past minutes."""
        async with self._asking:
            now_ns = self._clock_ns()
            elapsed_ns = now_ns - (self._asked_ns or 0)
            is_first = self._asked_ns is None or elapsed_ns > IDLE_NS
            self._asked_ns = now_ns
            if is_first:
                self.samples.clear()
                self._last.clear()
            replicas = self._replicas()
            answers = await asyncio.gather(*(self._ask(name, get) for name, get in replicas.items()))
            found = {name: got for name, got in zip(replicas, answers, strict=True) if got}
            self._last = {name: self._last[name] for name in self._last.keys() & replicas.keys()}
            self._last |= {name: samples[-1] for name, samples in found.items()}
            if is_first:
                by_age: dict[int, dict[str, list[Sample]]] = {}
                for name, samples in found.items():
                    for one in samples:
                        age = round((samples[-1].at_unix_ms - one.at_unix_ms) / 1000)
                        by_age.setdefault(age, {}).setdefault(name, []).append(one)
                for age, of_replicas in sorted(by_age.items(), reverse=True):
                    present = [ones[-1] for ones in of_replicas.values()]
                    self._add(now_unix_ms - 1000 * age, 1.0, present, chain(*of_replicas.values()))
            else:
                self._add(now_unix_ms, elapsed_ns / 1e9, [*self._last.values()], chain(*found.values()))

    async def _ask(self, name: str, get: Get) -> Sequence[Sample]:
        """Return the new samples of a replica, oldest first, or none if it sends none."""
        after = self._last[name].number if name in self._last else 0
        with suppress(NoAnswer, *UNREADABLE):
            status, content = await get(f"/debug/samples?after={after}")
            if status == 200:
                found = _decode(content)
                if not any(self.boundaries_seconds.values()):
                    self.boundaries_seconds = found.boundaries_seconds
                return found.samples if found.boundaries_seconds == self.boundaries_seconds else ()
        return ()

    def _add(self, at_unix_ms: int, seconds: float, present: Sequence[Sample], fresh: Iterable[Sample]) -> None:
        """Add a sample of all replicas: its gauges are from the samples at `present`, its increases from the `fresh`
        ones."""
        self._number += 1
        increases: dict[str, Counter[Any]] = {name: Counter() for name in ("requests", *HISTOGRAMS)}
        computed = 0.0
        generated = 0.0
        for one in fresh:
            increases["requests"].update(one.requests)
            for name in HISTOGRAMS:
                increases[name].update(dict(getattr(one, name)))
            generated += one.generation_tokens
            computed += one.computed_tokens
        number = max(1, len(present))
        histograms: Mapping[str, Any] = {name: sorted(increases[name].items()) for name in HISTOGRAMS}
        self.samples.append(
            Sample(
                number=self._number,
                at_unix_ms=at_unix_ms,
                seconds=seconds,
                running=sum(one.running for one in present),
                waiting=sum(one.waiting for one in present),
                tokenizing=sum(one.tokenizing for one in present),
                kv_usage=sum(one.kv_usage for one in present) / number,
                kv_cached=sum(one.kv_cached for one in present) / number,
                requests=dict(increases["requests"]),
                generation_tokens=generated,
                computed_tokens=computed,
                **histograms,
            )
        )


def replicas_of(watch: Watch) -> Mapping[str, Get]:
    """Return the replicas of a gateway."""

    def getter(upstream: Upstream) -> Get:
        return lambda target: upstream.get(target.encode(), watch.headers, MOST_BYTES, ASK_SECONDS)

    return {name: getter(upstream) for name, upstream in watch.upstreams.items()}
