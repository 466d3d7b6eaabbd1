"""vLLM's metric names show the same series to dashboards, autoscalers and routers that are made for vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable

from oaiserve.record import Outcome
from oaiserve.telemetry import names
from oaiserve.telemetry.observations import Observations
from oaiserve.telemetry.series import CallbackFamily, CounterFamily, Family, HistogramFamily, Number
from oaiserve.telemetry.snapshot import Snapshot, kv_cache_usage

ENGINE = "0"  # the index of the only engine
MOST_ADAPTERS = 256  # in one step: all that can be loaded


def vllm_families(observed: Observations, now: Callable[[], Snapshot], *, model: str, block_size: str) -> list[Family]:
    """Return the families under vLLM's names. `now` returns the snapshot for the page that is being rendered."""
    own = (model, ENGINE)
    shared = {"renamed": {"model_name": "model"}, "constant": {"engine": ENGINE}}
    finished = {**shared, "where": {"outcome": str(Outcome.FINISHED)}}

    def from_snapshot(metric: names.Metric, read: Callable[[Snapshot], Number]) -> CallbackFamily:
        return CallbackFamily(metric, lambda: {own: read(now())})

    def phase(metric: names.Metric, name: str) -> HistogramFamily:
        where = {**finished["where"], "phase": name}
        return HistogramFamily(metric, observed.phase, **{**shared, "where": where})

    return [
        from_snapshot(names.VLLM_REQUESTS_RUNNING, lambda snapshot: snapshot.num_running),
        from_snapshot(names.VLLM_REQUESTS_WAITING, lambda snapshot: snapshot.num_waiting),
        CallbackFamily(names.VLLM_LORA_REQUESTS, lambda: _lora_requests(own, now())),
        from_snapshot(names.VLLM_KV_CACHE_USAGE, kv_cache_usage),
        CallbackFamily(names.VLLM_CACHE_CONFIG, lambda: {(*own, block_size, str(now().blocks_total)): 1}),
        from_snapshot(names.VLLM_PREFIX_CACHE_QUERIES, lambda snapshot: snapshot.num_prefix_queries),
        from_snapshot(names.VLLM_PREFIX_CACHE_HITS, lambda snapshot: snapshot.num_prefix_hits),
        from_snapshot(names.VLLM_PREEMPTIONS, lambda snapshot: snapshot.num_preemptions),
        from_snapshot(names.VLLM_DRAFTS, lambda snapshot: snapshot.num_drafts),
        from_snapshot(names.VLLM_DRAFT_TOKENS, lambda snapshot: snapshot.num_draft_tokens),
        from_snapshot(names.VLLM_ACCEPTED_TOKENS, lambda snapshot: snapshot.num_accepted_tokens),
        CounterFamily(names.VLLM_PROMPT_TOKENS, observed.prompt_tokens, **shared),
        CounterFamily(names.VLLM_GENERATION_TOKENS, observed.generation_tokens, **shared),
        CounterFamily(
            names.VLLM_REQUEST_SUCCESS,
            observed.choices,
            renamed={"model_name": "model", "finished_reason": "reason"},
            constant={"engine": ENGINE},
        ),
        HistogramFamily(names.VLLM_TIME_TO_FIRST_TOKEN, observed.time_to_first_token, **shared),
        HistogramFamily(names.VLLM_INTER_TOKEN_LATENCY, observed.inter_token_latency, **shared),
        HistogramFamily(names.VLLM_TIME_PER_OUTPUT_TOKEN, observed.time_per_output_token, **finished),
        HistogramFamily(names.VLLM_DURATION, observed.duration, **finished),
        phase(names.VLLM_QUEUE, "queue"),
        phase(names.VLLM_PREFILL, "prefill"),
        phase(names.VLLM_DECODE, "decode"),
        HistogramFamily(names.VLLM_INFERENCE, observed.inference, **finished),
        HistogramFamily(names.VLLM_REQUEST_PROMPT_TOKENS, observed.request_prompt_tokens, **finished),
        HistogramFamily(names.VLLM_REQUEST_GENERATION_TOKENS, observed.request_generation_tokens, **finished),
        HistogramFamily(names.VLLM_REQUEST_LONGEST_CHOICE_TOKENS, observed.request_longest_choice_tokens, **finished),
        HistogramFamily(names.VLLM_REQUEST_CHOICES, observed.request_choices, **finished),
        HistogramFamily(names.VLLM_REQUEST_MAX_TOKENS, observed.request_max_tokens, **finished),
        HistogramFamily(names.VLLM_STEP_TOKENS, observed.step_tokens, constant={"model_name": model, "engine": ENGINE}),
    ]


def _lora_requests(own: tuple[str, str], snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    """Return one sample, whose labels name the adapters that run and those that wait; none if no adapter is loaded."""
    if not snapshot.adapters:
        return {}
    running, waiting = (
        ",".join(sorted(name for name, numbers in snapshot.adapters.items() if numbers[state])) for state in (0, 1)
    )
    return {(*own, str(MOST_ADAPTERS), running, waiting): time.time()}
