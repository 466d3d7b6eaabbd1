"""vLLM's metric names show the same series to dashboards, autoscalers and routers that are made for vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable

from oaiserve.facts.record import Outcome
from oaiserve.telemetry import names, vllm_names
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
        from_snapshot(vllm_names.REQUESTS_RUNNING, lambda snapshot: snapshot.num_running),
        from_snapshot(vllm_names.REQUESTS_WAITING, lambda snapshot: snapshot.num_waiting),
        CallbackFamily(vllm_names.LORA_REQUESTS, lambda: _lora_requests(own, now())),
        from_snapshot(vllm_names.KV_CACHE_USAGE, kv_cache_usage),
        CallbackFamily(vllm_names.CACHE_CONFIG, lambda: {(*own, block_size, str(now().blocks_total)): 1}),
        from_snapshot(vllm_names.PREFIX_CACHE_QUERIES, lambda snapshot: snapshot.num_prefix_queries),
        from_snapshot(vllm_names.PREFIX_CACHE_HITS, lambda snapshot: snapshot.num_prefix_hits),
        from_snapshot(vllm_names.PREEMPTIONS, lambda snapshot: snapshot.num_preemptions),
        from_snapshot(vllm_names.DRAFTS, lambda snapshot: snapshot.num_drafts),
        from_snapshot(vllm_names.DRAFT_TOKENS, lambda snapshot: snapshot.num_draft_tokens),
        from_snapshot(vllm_names.ACCEPTED_TOKENS, lambda snapshot: snapshot.num_accepted_tokens),
        CounterFamily(vllm_names.PROMPT_TOKENS, observed.prompt_tokens, **shared),
        CounterFamily(vllm_names.GENERATION_TOKENS, observed.generation_tokens, **shared),
        CounterFamily(
            vllm_names.REQUEST_SUCCESS,
            observed.choices,
            renamed={"model_name": "model", "finished_reason": "reason"},
            constant={"engine": ENGINE},
        ),
        HistogramFamily(vllm_names.TIME_TO_FIRST_TOKEN, observed.time_to_first_token, **shared),
        HistogramFamily(vllm_names.INTER_TOKEN_LATENCY, observed.inter_token_latency, **shared),
        HistogramFamily(vllm_names.TIME_PER_OUTPUT_TOKEN, observed.time_per_output_token, **finished),
        HistogramFamily(vllm_names.DURATION, observed.duration, **finished),
        phase(vllm_names.QUEUE, "queue"),
        phase(vllm_names.PREFILL, "prefill"),
        phase(vllm_names.DECODE, "decode"),
        HistogramFamily(vllm_names.INFERENCE, observed.inference, **finished),
        HistogramFamily(vllm_names.REQUEST_PROMPT_TOKENS, observed.request_prompt_tokens, **finished),
        HistogramFamily(vllm_names.REQUEST_GENERATION_TOKENS, observed.request_generation_tokens, **finished),
        HistogramFamily(vllm_names.REQUEST_LONGEST_CHOICE_TOKENS, observed.request_longest_choice_tokens, **finished),
        HistogramFamily(vllm_names.REQUEST_CHOICES, observed.request_choices, **finished),
        HistogramFamily(vllm_names.REQUEST_MAX_TOKENS, observed.request_max_tokens, **finished),
        HistogramFamily(vllm_names.STEP_TOKENS, observed.step_tokens, constant={"model_name": model, "engine": ENGINE}),
    ]


def _lora_requests(own: tuple[str, str], snapshot: Snapshot) -> dict[tuple[str, ...], Number]:
    """Return one sample, whose labels name the adapters that run and those that wait; none if no adapter is loaded."""
    if not snapshot.adapters:
        return {}
    running, waiting = (
        ",".join(sorted(name for name, numbers in snapshot.adapters.items() if numbers[state])) for state in (0, 1)
    )
    return {(*own, str(MOST_ADAPTERS), running, waiting): time.time()}
