"""`EngineNumbers` is the table of the engine's numbers: the engine thread counts in one object and publishes copies of
it.

Sequences are choices: a request has `prompts * n` of them. Stdlib only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from oaiserve.facts.fact import fact
from oaiserve.facts.step_record import HostPart


class LoadTotals(NamedTuple):
    """The current load, the time since which it holds, and the sums of past loads up to then. Two of these give the
    mean load between them.

    A momentary number fluctuates so much that routers that look at it would follow chance. A mean over time does not.
    """

    at_ns: int = 0
    num_open: int = 0  # requests that have been submitted and have not ended
    uncomputed_tokens: int = 0  # uncomputed tokens of their prompts
    # These are floats because the products exceed a 64-bit integer in a message.
    open_ns: float = 0.0  # requests times nanoseconds
    uncomputed_token_ns: float = 0.0  # tokens times nanoseconds

    def after(self, now_ns: int, num_open: int, uncomputed_tokens: int) -> LoadTotals:
        past_ns = now_ns - self.at_ns
        return LoadTotals(
            now_ns,
            num_open,
            uncomputed_tokens,
            self.open_ns + past_ns * self.num_open,
            self.uncomputed_token_ns + past_ns * self.uncomputed_tokens,
        )

    def mean_since(self, before: LoadTotals) -> tuple[float, float]:
        """Return the mean number of open requests and of uncomputed tokens since an earlier total."""
        passed_ns = max(1, self.at_ns - before.at_ns)
        open_ns = self.open_ns - before.open_ns
        return open_ns / passed_ns, (self.uncomputed_token_ns - before.uncomputed_token_ns) / passed_ns


@dataclass(slots=True)
class EngineNumbers:
    """The engine's numbers after a step. A published copy never changes."""

    # Current numbers, written just before a copy is published.
    num_running: int = fact("Sequences in the running batch.", metric="oaiserve_requests_running")
    num_waiting: int = fact("Sequences in the queue.", metric="oaiserve_requests_waiting")
    num_deferred: int = fact("Those of them that wait for a prefix that is being computed or read.")
    num_background_running: int = fact(
        "Background sequences in the running batch.", metric="oaiserve_background_running"
    )
    num_background_waiting: int = fact("Background sequences in the queue.", metric="oaiserve_background_waiting")
    num_waiting_tokens: int = fact(
        "Prompt tokens of requests that wait for their first step.", metric="oaiserve_waiting_prompt_tokens"
    )
    drain_rate: float = fact(
        "Requests that leave the queue per second, as last measured.",
        0.0,
        metric="oaiserve_drain_rate_requests_per_second",
    )
    num_tokenizing: int = fact(  # written by Engine.snapshot
        "Requests that wait for a tokenize worker.",
        metric="oaiserve_tokenize_queue_depth",
    )
    by_adapter: Mapping[int, tuple[int, int]] = field(
        default_factory=dict
    )  # running and waiting sequences by adapter, if any has an adapter
    adapters: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # the same by the adapter's name; written by Engine.snapshot
    blocks_used: int = 0
    blocks_cached: int = 0  # blocks that the prefix cache can find
    blocks_reusable: int = 0  # free blocks that the prefix cache can find
    blocks_total: int = 0
    # When the engine thread became idle; `host_ns` doesn't include this time yet.
    idle_since_ns: int | None = None
    load: LoadTotals = LoadTotals()  # noqa: RUF009 - immutable

    num_encoding: int = fact(
        "Requests that wait for their images and sounds to be encoded.", metric="oaiserve_media_requests_waiting"
    )
    num_waiting_media_rows: int = fact(
        "Tokens of images and sounds that are not encoded yet.", metric="oaiserve_media_waiting_tokens"
    )
    media_cache_bytes: int = fact(
        "Bytes of encoded images and sounds in the cache.", metric="oaiserve_media_cache_bytes"
    )
    num_offloaded: int = fact("KV blocks in the host memory of --kv-offload.", metric="oaiserve_kv_offload_blocks")

    # Sums over all steps so far.
    host_ns: Mapping[HostPart, int] = field(default_factory=lambda: dict.fromkeys(HostPart, 0))
    num_media_encoded: int = fact("Encoded images and sounds.", metric="oaiserve_media_encoded_total")
    num_media_rows: int = fact("Tokens of encoded images and sounds.", metric="oaiserve_media_encoded_tokens_total")
    media_encode_ns: int = fact(
        "Engine time spent on encoding images and sounds.", metric="oaiserve_media_encode_seconds_total"
    )
    num_media_queries: int = fact(
        "Lookups of images and sounds in the cache.", metric="oaiserve_media_cache_queries_total"
    )
    num_media_hits: int = fact("Images and sounds found in the cache.", metric="oaiserve_media_cache_hits_total")
    num_prefix_queries: int = fact(
        "Prompt tokens looked up in the prefix cache.", metric="oaiserve_prefix_cache_query_tokens_total"
    )
    num_prefix_hits: int = fact(
        "Prompt tokens found in the prefix cache.", metric="oaiserve_prefix_cache_hit_tokens_total"
    )
    num_evicted_blocks: int = fact(
        "Blocks of the prefix cache that were evicted: their content was dropped, or moved to a lower tier.",
        metric="oaiserve_prefix_cache_evicted_blocks_total",
    )
    evicted_unused_ns: float = fact(
        "Time between the last use of evicted blocks and their eviction, added up.",
        0.0,
        metric="oaiserve_prefix_cache_evicted_unused_seconds_total",
    )
    num_blocks_read: int = fact(
        "Blocks read from --prefix-cache-dir.", metric="oaiserve_prefix_cache_read_blocks_total"
    )
    num_blocks_written: int = fact(
        "Blocks written to --prefix-cache-dir.", metric="oaiserve_prefix_cache_written_blocks_total"
    )
    num_blocks_skipped: int = fact(
        "Blocks that --prefix-cache-dir skipped: overwritten in memory, too many waiting, or a disk failure.",
        metric="oaiserve_prefix_cache_skipped_blocks_total",
    )
    num_offload_hits: int = fact(
        "Prefixes found in the host memory of --kv-offload.", metric="oaiserve_kv_offload_hits_total"
    )
    offload_out_bytes: int = fact(
        "Bytes of evicted KV blocks copied to the host memory of --kv-offload.",
        metric="oaiserve_kv_offload_out_bytes_total",
    )
    offload_in_bytes: int = fact(
        "Bytes of KV blocks restored from the host memory of --kv-offload.", metric="oaiserve_kv_offload_in_bytes_total"
    )
    num_preemptions: int = fact(
        "Sequences put back into the queue because the KV cache was full.",
        metric="oaiserve_preemptions_total",
    )
    num_out_of_memory: int = fact(
        "Steps split because the GPU ran out of memory.",
        metric="oaiserve_engine_out_of_memory_total",
    )
    num_hangs: int = fact(  # written by Engine.snapshot
        "Hangs of the engine: no progress for longer than a step can take.",
        metric="oaiserve_engine_hangs_total",
    )
    num_masked_draws: int = fact(
        "Tokens drawn from those that a grammar allows.",
        metric="oaiserve_grammar_masked_draws_total",
    )
    num_forced_tokens: int = fact(
        "Tokens taken without a draw, because a grammar allowed no other.",
        metric="oaiserve_grammar_forced_tokens_total",
    )
    num_drafts: int = fact("Verified drafts.", metric="oaiserve_drafts_total")
    num_draft_tokens: int = fact("Tokens of drafts that were verified.")
    num_accepted_tokens: int = fact("Tokens of drafts that came true.")
    drafts_by_accepted: tuple[int, ...] = fact("Verified drafts, by the number of their tokens that came true.", ())
    num_steps: int = fact("Steps of the engine.", metric="oaiserve_engine_steps_total")
    num_step_sequences: int = fact("Sequences in steps, added up.")
    num_step_tokens: int = fact("Tokens computed in steps, added up.")
    model_ns: int = fact(
        "Time of the model, on a GPU by its own clock.",
        metric="oaiserve_engine_model_seconds_total",
    )
    core_ns: int = fact(
        "CPU time of the process; with work, up to the last step.",
        metric="oaiserve_meter_core_seconds_total",
    )
    nobody_core_ns: int = fact(
        "CPU time that no request accounts for: the start, and times without work.",
        metric="oaiserve_nobody_core_seconds_total",
    )
    nobody_machine_ns: int = fact("Engine time without work.", metric="oaiserve_nobody_machine_seconds_total")
    kv_byte_ns: float = fact(  # a float, because 2 GiB for 5 s exceed 63 bits
        "Bytes of the KV cache in use, times seconds.", 0.0, metric="oaiserve_meter_kv_byte_seconds_total"
    )
    idle_with_work_ns: int = fact(
        "Time between steps while there was work. On a GPU, the time it waited for a launch.",
        metric="oaiserve_engine_idle_with_work_seconds_total",
    )

    def copy(self) -> EngineNumbers:
        """Return a copy. This is five times as fast as `dataclasses.replace`, and the engine thread makes a copy per
        step."""
        return EngineNumbers(*_values(self))

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache's blocks in use, 0 to 1. It is 0 if the engine has no blocks yet."""
        return self.blocks_used / max(1, self.blocks_total)


class ReplicaState(NamedTuple):
    """The state of one of several engines that share a front process."""

    name: str
    is_up: bool
    num_restarts: int
    numbers: EngineNumbers
    choices: Mapping[str, int]  # requests for which the router chose it, by the reason


_names = [one.name for one in fields(EngineNumbers)]
_CURRENT = _names[: _names.index("host_ns")]
_values = attrgetter(*_names)
_at_rest = EngineNumbers()


def added(numbers: Iterable[EngineNumbers]) -> EngineNumbers:
    """Return the total of several engines' numbers, without their `load` and `idle_since_ns`."""
    together = EngineNumbers(*map(_added, zip(*map(_values, numbers), strict=True)))
    return replace(together, load=LoadTotals(), idle_since_ns=None)


def sums_of(numbers: EngineNumbers) -> EngineNumbers:
    """Return the sums of an engine that has ended, with its current numbers set to zero."""
    return replace(numbers, **{name: getattr(_at_rest, name) for name in _CURRENT})


def _added(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _added([each[key] for each in values if key in each]) for key in dict.fromkeys(chain(*values))}
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip_longest(*values, fillvalue=0)))
    return sum(value or 0 for value in values)
