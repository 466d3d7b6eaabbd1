"""A replica's report for routers: its load, and its prefix keys.

A report is complete: it replaces the previous one, so the next one makes up for a lost one. Its size is bounded: for
any cache, it has at most MOST_KEYS keys, which are 8 KiB. One per second is enough.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    Keys = array[int]
else:  # msgspec evaluates this type when a report is sent, and has no generic array.
    Keys = array

MOST_KEYS = 1024
MOST_MODELS = 1024  # maximum models in one report
MOST_NAME_CHARACTERS = 256  # characters of each name
MOST_REPORT_BYTES = 2**20
# Marks the requests of a router. It is dropped if it comes from a peer that is not a trusted proxy.
ROUTER_HEADER = "x-oaiserve-router"

Place = TypeVar("Place")

# Larger values are not credible, and would spoil a router's sums. A report with one is refused.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Load = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
MOST_SECONDS = 1e6
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The report of one replica at one moment."""

    replica: str  # the name by which requests are sent to it
    incarnation: str  # id of its process. After a restart, its cache is empty.
    number: int  # number of the report; a later one has a higher number
    # Means since the previous report: momentary numbers vary so much that routers would only follow chance.
    num_open: float  # requests that it has accepted and not finished, including waiting ones
    waiting_tokens: float  # tokens of their prompts that are still to be computed
    keys: Keys  # type "Q": its prefix keys, the most useful ones first
    # Current numbers, for programs that start and stop replicas:
    num_running: int = 0  # running sequences
    num_waiting: int = 0  # sequences that wait for a step, or for the tokenizer
    kv_use: float = 0.0  # share of the KV cache's blocks that sequences use
    step_seconds: float = 0.0  # mean time of a step since the previous report
    models: tuple[str, ...] = ()  # names of its model and adapters; none: not stated
    aliases: tuple[str, ...] = ()  # further names that requests may use, which are not listed

    @property
    def is_full(self) -> bool:
        """Return True if the replica may hold more keys than the report."""
        return len(self.keys) >= MOST_KEYS


def together(reports: Sequence[ReplicaReport]) -> ReplicaReport:
    """Return the report of a server that has these replicas: sums, means of shares and times, and the most useful keys
    of each."""
    keys = dict.fromkeys(key for row in zip_longest(*(one.keys for one in reports)) for key in row if key is not None)
    return replace(
        reports[0],
        num_open=sum(one.num_open for one in reports),
        waiting_tokens=sum(one.waiting_tokens for one in reports),
        keys=array("Q", islice(keys, MOST_KEYS)),
        num_running=sum(one.num_running for one in reports),
        num_waiting=sum(one.num_waiting for one in reports),
        kv_use=fmean(one.kv_use for one in reports),
        step_seconds=fmean(one.step_seconds for one in reports),
    )


class Report(msgspec.Struct):
    """A replica's report over HTTP: its load, and the prefix keys of its cached prompts (docs/gateway.md)."""

    incarnation: Annotated[str, msgspec.Meta(max_length=128)]
    number: Count
    num_open: Load
    waiting_tokens: Load
    # Integers of 64 bits, little-endian, as on all machines that it runs on.
    keys: Annotated[bytes, msgspec.Meta(max_length=8 * MOST_KEYS)]
    num_running: Count
    num_waiting: Count
    kv_use: Annotated[float, msgspec.Meta(ge=0, le=1)]
    is_ready: bool
    step_seconds: Seconds = 0.0
    is_hung: bool = False  # The engine makes no progress.
    # Names of its model and adapters; none if there are too many for a report.
    models: Annotated[tuple[ModelName, ...], msgspec.Meta(max_length=MOST_MODELS)] = ()
    # Names that requests may use, too, such as the path of the model's file.
    aliases: Annotated[tuple[ModelName, ...], msgspec.Meta(max_length=MOST_MODELS)] = ()

    def __post_init__(self) -> None:
        if len(self.keys) % 8:
            raise ValueError("the keys are not integers of 64 bits")

    @classmethod
    def of(
        cls,
        report: ReplicaReport,
        *,
        is_ready: bool,
        is_hung: bool,
        models: tuple[str, ...],
        aliases: tuple[str, ...] = (),
    ) -> Report:
        if len(models) > MOST_MODELS or any(len(name) > MOST_NAME_CHARACTERS for name in models):
            models = aliases = ()  # Routers then send it requests for any model.
        own = {name: getattr(report, name) for name in cls.__struct_fields__ if hasattr(report, name)}
        short_aliases = tuple(name for name in aliases if len(name) <= MOST_NAME_CHARACTERS)
        own |= {"keys": report.keys.tobytes(), "models": models, "aliases": short_aliases}
        # Estimates are unbounded, and routers would reject the whole report because of one that is too large.
        own["step_seconds"] = min(MOST_SECONDS, report.step_seconds)
        return cls(**own, is_ready=is_ready, is_hung=is_hung)

    def of_replica(self, name: str) -> ReplicaReport:
        return ReplicaReport(
            name,
            self.incarnation,
            self.number,
            self.num_open,
            self.waiting_tokens,
            array("Q", self.keys),
            step_seconds=self.step_seconds,
            models=self.models,
            aliases=self.aliases,
        )


class HeldPrefixes(Generic[Place]):
    """The prefix keys of a replica's computed prompts, for its reports.

    `Place` is the cache's place of the last token of a prefix, such as the hash of its block. Keys used again, by
    another prompt or by the next turn of a conversation, come before those used once. Each of the two halves is
    bounded, and drops the least recently used keys first, as the cache does.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._used_again: OrderedDict[int, Place] = OrderedDict()
        self._used_once: OrderedDict[int, Place] = OrderedDict()

    def note(self, keys: Iterable[tuple[int, Place]]) -> None:
        """Note the prefix keys of a prompt with their places, the shortest one first."""
        again = self._used_again
        once = self._used_once
        for key, place in keys:
            if key in again:
                again.move_to_end(key)
                again[key] = place
            elif once.pop(key, None) is not None:
                again[key] = place
            else:
                once[key] = place
        for part in (again, once):
            while len(part) > self._most_keys:
                part.popitem(last=False)

    def keys(self, is_cached: Callable[[Place], bool]) -> Keys:
        """Return the keys for a report, and drop those that are no longer cached."""
        newest = array("Q")
        for part in (self._used_again, self._used_once):
            gone = [key for key, place in part.items() if not is_cached(place)]
            for key in gone:
                del part[key]
            newest.extend(reversed(part))
        return newest[: self._most_keys]
