"""The engine's numbers of one moment, and the families that show them. The engine never pushes a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from oaiserve.record import HostPart
from oaiserve.telemetry import names
from oaiserve.telemetry.series import NS_PER_SECOND, Number, Reading


class Snapshot(Protocol):
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    @property
    def num_tokenizing(self) -> int: ...
    @property
    def drain_rate(self) -> float: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def blocks_reusable(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def num_prefix_queries(self) -> int: ...
    @property
    def num_prefix_hits(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_out_of_memory(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def model_ns(self) -> int: ...
    @property
    def idle_with_work_ns(self) -> int: ...
    @property
    def host_ns(self) -> Mapping[HostPart, int]: ...


def engine_families(now: Callable[[], Snapshot]) -> list[Reading]:
    """`now`: the numbers for the page that is being made."""

    def reading(metric: names.Metric, read: Callable[[Snapshot], Number]) -> Reading:
        return Reading(metric, lambda: {(): read(now())})

    return [
        reading(names.REQUESTS_RUNNING, lambda snapshot: snapshot.num_running),
        reading(names.REQUESTS_WAITING, lambda snapshot: snapshot.num_waiting),
        reading(names.WAITING_PROMPT_TOKENS, lambda snapshot: snapshot.num_waiting_tokens),
        reading(names.DRAIN_RATE, lambda snapshot: snapshot.drain_rate),
        reading(names.TOKENIZE_QUEUE_DEPTH, lambda snapshot: snapshot.num_tokenizing),
        reading(names.KV_CACHE_USAGE, usage),
        Reading(names.KV_BLOCKS, lambda: _blocks(now())),
        reading(names.PREFIX_CACHE_QUERY_TOKENS, lambda snapshot: snapshot.num_prefix_queries),
        reading(names.PREFIX_CACHE_HIT_TOKENS, lambda snapshot: snapshot.num_prefix_hits),
        reading(names.PREEMPTIONS, lambda snapshot: snapshot.num_preemptions),
        reading(names.ENGINE_OUT_OF_MEMORY, lambda snapshot: snapshot.num_out_of_memory),
        reading(names.ENGINE_STEPS, lambda snapshot: snapshot.num_steps),
        reading(names.ENGINE_MODEL_SECONDS, lambda snapshot: snapshot.model_ns / NS_PER_SECOND),
        reading(names.ENGINE_IDLE_WITH_WORK_SECONDS, lambda snapshot: snapshot.idle_with_work_ns / NS_PER_SECOND),
        Reading(names.ENGINE_HOST_SECONDS, lambda: _host_seconds(now())),
    ]


def usage(snapshot: Snapshot) -> float:
    """Of the KV cache, 0 to 1; 0 as long as there is none."""
    return snapshot.blocks_used / max(1, snapshot.blocks_total)


def _host_seconds(snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    return {(part,): spent_ns / NS_PER_SECOND for part, spent_ns in snapshot.host_ns.items()}


def _blocks(snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    used, cached = snapshot.blocks_used, snapshot.blocks_reusable
    return {("used",): used, ("cached",): cached, ("free",): snapshot.blocks_total - used - cached}
