"""The metric families of the engine's snapshot, and of the server's connections, front ends and stored responses.

They are read when a page is rendered. None of these parts pushes a number to telemetry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from oaiserve.facts.record import HostPart
from oaiserve.telemetry import names
from oaiserve.telemetry.series import NS_PER_SECOND, CallbackFamily, Number


class Snapshot(Protocol):
    """The engine's numbers of one moment, as far as telemetry reads them; `EngineSnapshot` has these fields."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def adapters(self) -> Mapping[str, tuple[int, int]]: ...
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
    def num_masked_draws(self) -> int: ...
    @property
    def num_forced_tokens(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def num_model_draft_tokens(self) -> int: ...
    @property
    def num_accepted_model_tokens(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def model_ns(self) -> int: ...
    @property
    def idle_with_work_ns(self) -> int: ...
    @property
    def host_ns(self) -> Mapping[HostPart, int]: ...


class ConnectionCounts(Protocol):
    """The numbers of the server's connections; `Connections` has these attributes."""

    @property
    def num_open(self) -> int: ...
    @property
    def refused(self) -> Mapping[str, int]: ...


def connection_families(counts: ConnectionCounts | None) -> list[CallbackFamily]:
    """Return the families of the server's connections. They are empty if no server counts."""
    return [
        CallbackFamily(names.CONNECTIONS, lambda: {} if counts is None else {(): counts.num_open}),
        CallbackFamily(
            names.CONNECTIONS_REFUSED,
            lambda: {} if counts is None else {(reason,): number for reason, number in counts.refused.items()},
        ),
    ]


class ProcessCounts(Protocol):
    """The numbers of a process; `ProcessNumbers` of front_ends/process_numbers.py has these attributes."""

    @property
    def cpu_seconds(self) -> float: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def open_files(self) -> int: ...


class FrontEndCounts(Protocol):
    """The numbers of the front ends; `FrontEnds` of front_ends/supervisor.py has these attributes."""

    @property
    def num_up(self) -> int: ...
    @property
    def num_ended(self) -> int: ...

    def processes(self) -> Mapping[int, ProcessCounts]:
        """Return the numbers of those that run, by number. This reads files."""


def front_end_families(counts: FrontEndCounts | None) -> list[CallbackFamily]:
    """Return the families of the front ends: zeros, and nothing of processes, if there are none."""

    def by_process(metric: names.Metric, read: Callable[[ProcessCounts], Number]) -> CallbackFamily:
        def values() -> dict[tuple[str, ...], Number]:
            processes = {} if counts is None else counts.processes()
            return {(str(number),): read(process) for number, process in processes.items()}

        return CallbackFamily(metric, values)

    return [
        CallbackFamily(names.FRONT_ENDS, lambda: {(): 0 if counts is None else counts.num_up}),
        CallbackFamily(names.FRONT_ENDS_ENDED, lambda: {(): 0 if counts is None else counts.num_ended}),
        by_process(names.FRONT_END_CPU_SECONDS, lambda process: process.cpu_seconds),
        by_process(names.FRONT_END_RESIDENT_BYTES, lambda process: process.resident_bytes),
        by_process(names.FRONT_END_OPEN_FDS, lambda process: process.open_files),
    ]


class StoreCounts(Protocol):
    """The numbers of the store of responses; `StoreCounts` of response_store.py has these attributes."""

    @property
    def number(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def dropped(self) -> Mapping[str, int]: ...


def store_families(now: Callable[[], StoreCounts] | None) -> list[CallbackFamily]:
    """Return the families of the store of responses. They are empty if there is none."""

    def from_counts(
        metric: names.Metric, read: Callable[[StoreCounts], dict[tuple[str, ...], Number]]
    ) -> CallbackFamily:
        return CallbackFamily(metric, lambda: {} if now is None else read(now()))

    return [
        from_counts(names.STORED_RESPONSES, lambda counts: {(): counts.number}),
        from_counts(names.STORED_RESPONSE_BYTES, lambda counts: {(): counts.num_bytes}),
        from_counts(
            names.STORED_RESPONSES_DROPPED,
            lambda counts: {(reason,): number for reason, number in counts.dropped.items()},
        ),
    ]


def engine_families(now: Callable[[], Snapshot]) -> list[CallbackFamily]:
    """Return the families of the engine's numbers. `now` returns the snapshot for the page that is being rendered."""

    def from_snapshot(metric: names.Metric, read: Callable[[Snapshot], Number]) -> CallbackFamily:
        return CallbackFamily(metric, lambda: {(): read(now())})

    return [
        from_snapshot(names.REQUESTS_RUNNING, lambda snapshot: snapshot.num_running),
        from_snapshot(names.REQUESTS_WAITING, lambda snapshot: snapshot.num_waiting),
        CallbackFamily(names.ADAPTER_REQUESTS, lambda: _adapter_requests(now())),
        from_snapshot(names.WAITING_PROMPT_TOKENS, lambda snapshot: snapshot.num_waiting_tokens),
        from_snapshot(names.DRAIN_RATE, lambda snapshot: snapshot.drain_rate),
        from_snapshot(names.TOKENIZE_QUEUE_DEPTH, lambda snapshot: snapshot.num_tokenizing),
        from_snapshot(names.KV_CACHE_USAGE, kv_cache_usage),
        CallbackFamily(names.KV_BLOCKS, lambda: _blocks(now())),
        from_snapshot(names.PREFIX_CACHE_QUERY_TOKENS, lambda snapshot: snapshot.num_prefix_queries),
        from_snapshot(names.PREFIX_CACHE_HIT_TOKENS, lambda snapshot: snapshot.num_prefix_hits),
        from_snapshot(names.PREEMPTIONS, lambda snapshot: snapshot.num_preemptions),
        from_snapshot(names.ENGINE_OUT_OF_MEMORY, lambda snapshot: snapshot.num_out_of_memory),
        from_snapshot(names.GRAMMAR_MASKED_DRAWS, lambda snapshot: snapshot.num_masked_draws),
        from_snapshot(names.GRAMMAR_FORCED_TOKENS, lambda snapshot: snapshot.num_forced_tokens),
        from_snapshot(names.DRAFTS, lambda snapshot: snapshot.num_drafts),
        CallbackFamily(names.DRAFT_TOKENS, lambda: _draft_tokens(now())),
        from_snapshot(names.ENGINE_STEPS, lambda snapshot: snapshot.num_steps),
        from_snapshot(names.ENGINE_MODEL_SECONDS, lambda snapshot: snapshot.model_ns / NS_PER_SECOND),
        from_snapshot(names.ENGINE_IDLE_WITH_WORK_SECONDS, lambda snapshot: snapshot.idle_with_work_ns / NS_PER_SECOND),
        CallbackFamily(names.ENGINE_HOST_SECONDS, lambda: _host_seconds(now())),
    ]


def kv_cache_usage(snapshot: Snapshot) -> float:
    """Return the share of the KV cache's blocks in use, 0 to 1. It is 0 if the engine has no blocks yet."""
    return snapshot.blocks_used / max(1, snapshot.blocks_total)


def _adapter_requests(snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    return {
        (adapter, state): number
        for adapter, numbers in snapshot.adapters.items()
        for state, number in zip(("running", "waiting"), numbers, strict=True)
    }


def _host_seconds(snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    return {(part,): spent_ns / NS_PER_SECOND for part, spent_ns in snapshot.host_ns.items()}


def _draft_tokens(snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    drafted, accepted = snapshot.num_model_draft_tokens, snapshot.num_accepted_model_tokens
    by_source = {
        "lookup": (snapshot.num_draft_tokens - drafted, snapshot.num_accepted_tokens - accepted),
        "model": (drafted, accepted),
    }
    return {
        (source, outcome): number
        for source, (drafted, accepted) in by_source.items()
        for outcome, number in (("accepted", accepted), ("rejected", drafted - accepted))
    }


def _blocks(snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    used, cached = snapshot.blocks_used, snapshot.blocks_reusable
    return {("used",): used, ("cached",): cached, ("free",): snapshot.blocks_total - used - cached}
