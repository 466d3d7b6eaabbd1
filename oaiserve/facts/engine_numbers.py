"""`EngineNumbers` is the table of the engine's numbers: the engine thread counts in one, and publishes copies of it.

Sequences are choices: a request has `prompts * n` of them. Stdlib only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import NamedTuple

from oaiserve.facts.fact import fact
from oaiserve.facts.record import HostPart


class LoadTotals(NamedTuple):
    """The present load with its beginning, and its sums up to then. Two of these give the mean between them.

    A momentary number scatters, so that many routers who look at it flee from chance. A mean over time does not.
    """

    at_ns: int = 0
    num_open: int = 0  # requests that have been submitted and have not ended
    uncomputed_tokens: int = 0  # of their prompts
    open_ns: int = 0  # requests times nanoseconds
    uncomputed_token_ns: int = 0  # tokens times nanoseconds

    def after(self, now_ns: int, num_open: int, uncomputed_tokens: int) -> LoadTotals:
        """Return the totals with the load from now on."""
        past_ns = now_ns - self.at_ns
        return LoadTotals(
            now_ns,
            num_open,
            uncomputed_tokens,
            self.open_ns + past_ns * self.num_open,
            self.uncomputed_token_ns + past_ns * self.uncomputed_tokens,
        )

    def mean_since(self, before: LoadTotals) -> tuple[float, float]:
        """Return the mean numbers of open requests and of uncomputed tokens between two totals, of which this is the
        later one."""
        passed_ns = max(1, self.at_ns - before.at_ns)
        open_ns = self.open_ns - before.open_ns
        return open_ns / passed_ns, (self.uncomputed_token_ns - before.uncomputed_token_ns) / passed_ns


@dataclass(slots=True)
class EngineNumbers:
    """The engine's numbers after a step. A copy that was published is never changed."""

    # The numbers of the moment, which are written when they are published.
    num_running: int = fact("Sequences that take part in steps of the engine.", metric="oaiserve_requests_running")
    num_waiting: int = fact("Sequences in the engine's queue.", metric="oaiserve_requests_waiting")
    num_background_running: int = fact(
        "Sequences of background work that have a place in the engine.", metric="oaiserve_background_running"
    )
    num_background_waiting: int = fact(
        "Sequences of background work in the engine's queue.", metric="oaiserve_background_waiting"
    )
    num_waiting_tokens: int = fact(
        "Prompt tokens of requests that have not entered a step.", metric="oaiserve_waiting_prompt_tokens"
    )
    drain_rate: float = fact(
        "Requests that leave the queue per second, as last measured while requests were waiting.",
        0.0,
        metric="oaiserve_drain_rate_requests_per_second",
    )
    num_tokenizing: int = fact(  # written by Engine.snapshot
        "Requests, also to /tokenize and /detokenize, that no tokenize worker has begun yet.",
        metric="oaiserve_tokenize_queue_depth",
    )
    by_adapter: Mapping[int, tuple[int, int]] = field(
        default_factory=dict
    )  # sequences that run and wait, if an adapter has one
    adapters: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # the same by name; written by Engine.snapshot
    blocks_used: int = 0
    blocks_cached: int = 0  # of all blocks, those that the prefix cache can find
    blocks_reusable: int = 0  # of the free ones, those that the prefix cache can find
    blocks_total: int = 0
    host_ns: Mapping[HostPart, int] = field(default_factory=lambda: dict.fromkeys(HostPart, 0))  # so far
    idle_since_ns: int | None = None  # the engine thread is idle since then, which is not in `host_ns` yet
    load: LoadTotals = LoadTotals()  # noqa: RUF009 - immutable

    num_encoding: int = fact(
        "Requests whose images and sounds are not all encoded yet.", metric="oaiserve_media_requests_waiting"
    )
    num_waiting_media_rows: int = fact(
        "Tokens of the images and sounds that are not encoded yet.", metric="oaiserve_media_waiting_tokens"
    )
    media_cache_bytes: int = fact(
        "Bytes of encoded images and sounds in the cache.", metric="oaiserve_media_cache_bytes"
    )

    # Sums over all steps so far.
    num_media_encoded: int = fact("Images and sounds that were encoded.", metric="oaiserve_media_encoded_total")
    num_media_rows: int = fact(
        "Tokens of images and sounds that were encoded.", metric="oaiserve_media_encoded_tokens_total"
    )
    media_encode_ns: int = fact(
        "Time of the engine to encode images and sounds, between steps.", metric="oaiserve_media_encode_seconds_total"
    )
    num_media_queries: int = fact(
        "Images and sounds looked up in the cache of encoded ones.", metric="oaiserve_media_cache_queries_total"
    )
    num_media_hits: int = fact(
        "Images and sounds found in the cache of encoded ones.", metric="oaiserve_media_cache_hits_total"
    )
    num_prefix_queries: int = fact(
        "Prompt tokens looked up in the prefix cache.", metric="oaiserve_prefix_cache_query_tokens_total"
    )
    num_prefix_hits: int = fact(
        "Prompt tokens found in the prefix cache.", metric="oaiserve_prefix_cache_hit_tokens_total"
    )
    num_blocks_read: int = fact(
        "Blocks read from --prefix-cache-dir into the prefix cache.", metric="oaiserve_prefix_cache_read_blocks_total"
    )
    num_blocks_written: int = fact(
        "Blocks written to --prefix-cache-dir.", metric="oaiserve_prefix_cache_written_blocks_total"
    )
    num_blocks_skipped: int = fact(
        "Blocks not written to --prefix-cache-dir, because memory had other content by then, too many waited for the "
        "disk, or it failed.",
        metric="oaiserve_prefix_cache_skipped_blocks_total",
    )
    num_preemptions: int = fact(
        "Preemptions: sequences put back into the queue because the KV cache had no free block.",
        metric="oaiserve_preemptions_total",
    )
    num_out_of_memory: int = fact(
        "Steps for which the GPU ran out of memory, so that they were computed in parts.",
        metric="oaiserve_engine_out_of_memory_total",
    )
    num_hangs: int = fact(  # written by Engine.snapshot
        "Times that the engine thread stayed in one part of its work for longer than --hang-seconds and than the step "
        "can take. The log has the stacks of all threads.",
        metric="oaiserve_engine_hangs_total",
    )
    num_masked_draws: int = fact(
        "Tokens drawn from those that a grammar lets come next, those behind a draft that did not come true included. "
        "The time to find which may come is the part masks of oaiserve_engine_host_seconds_total.",
        metric="oaiserve_grammar_masked_draws_total",
    )
    num_forced_tokens: int = fact(
        "Tokens that were not drawn, because a grammar left no other.", metric="oaiserve_grammar_forced_tokens_total"
    )
    num_drafts: int = fact(
        "Drafts that steps have verified: guesses at the next tokens of a sequence.", metric="oaiserve_drafts_total"
    )
    num_draft_tokens: int = fact("Tokens of drafts that were verified.")
    num_accepted_tokens: int = fact("Tokens of drafts that came true.")
    num_steps: int = fact("Steps of the engine.", metric="oaiserve_engine_steps_total")
    num_step_sequences: int = fact("Sequences in steps, added up.")
    num_step_tokens: int = fact("Tokens computed in steps, added up.")
    model_ns: int = fact(
        "Time that the model took, over all steps. On a GPU it is the time that the GPU was busy, by its own clock.",
        metric="oaiserve_engine_model_seconds_total",
    )
    core_ns: int = fact(
        "Time that the process used of cores, up to the last step: that of ended requests, of open ones and of nobody.",
        metric="oaiserve_meter_core_seconds_total",
    )
    nobody_core_ns: int = fact(
        "Of that, the time that is no request's: the start, and times without work.",
        metric="oaiserve_nobody_core_seconds_total",
    )
    nobody_machine_ns: int = fact(
        "Time of the engine that is no request's: times without work.", metric="oaiserve_nobody_machine_seconds_total"
    )
    kv_byte_ns: int = fact(
        "Bytes of the KV cache that sequences used, times seconds.", metric="oaiserve_meter_kv_byte_seconds_total"
    )
    idle_with_work_ns: int = fact(
        "Time between steps while there was work: the engine thread's own work and its waits for a core. On a GPU it "
        "is the time that the GPU waited for the next launch, by its own clock.",
        metric="oaiserve_engine_idle_with_work_seconds_total",
    )

    def copy(self) -> EngineNumbers:
        """Return a copy, in a fifth of the time of `dataclasses.replace`: the engine thread makes one for each step."""
        return EngineNumbers(*_values(self))

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache's blocks in use, 0 to 1. It is 0 if the engine has no blocks yet."""
        return self.blocks_used / max(1, self.blocks_total)


_values = attrgetter(*(one.name for one in fields(EngineNumbers)))
