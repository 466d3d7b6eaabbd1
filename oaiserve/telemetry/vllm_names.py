"""Metrics with vLLM's names, for dashboards, autoscalers and routers that are made for vLLM.

They show the series of `names`, and the engine's numbers, under other names. Only those in `names.FOR_VLLM` have series
of their own. All are on /metrics only.
"""

from __future__ import annotations

from oaiserve.facts.metric import Metric, unit_of
from oaiserve.telemetry import names
from oaiserve.telemetry.names import ENGINE, FINISHED

ENGINE_INDEX = "0"  # index of the only engine
MOST_ADAPTERS = 256  # the most adapters in a step, which is as many as can be loaded

_TIME_TO_FIRST_TOKEN_BUCKETS = (*names.GEN_AI_TIME_TO_FIRST_TOKEN.buckets, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_INTER_TOKEN_BUCKETS = (*names.GEN_AI_TIME_PER_OUTPUT_TOKEN.buckets, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)  # fmt: skip
_CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_BUCKETS = (1.0, *(float(2**exponent) for exponent in range(3, 15)))


def _metric(
    name: str,
    of: Metric | str | None,
    help: str = "",
    *more: str,  # labels
    buckets: tuple[float, ...] = (),
    where: tuple[tuple[str, str], ...] = (),
) -> Metric:
    """Return a metric that shows another metric or, given its field, a number of the engine."""
    if isinstance(of, Metric):
        kind = of.type
    elif name.endswith("_total"):
        kind = "counter"
    else:
        kind = "gauge"
    shown = ENGINE.get(of, of) if isinstance(of, str) else of
    help = help or f"Same as {shown.name if isinstance(shown, Metric) else shown}."
    # The name of such a histogram ends like a counter's, but it is not a sum, and has no unit.
    if kind == "histogram" and name.endswith("_total"):
        unit = ""
    else:
        unit = unit_of(name)
    return Metric(f"vllm:{name}", kind, help, unit, ("model_name", "engine", *more), buckets, of=of, where=where)


def _finished(name: str, of: Metric, buckets: tuple[float, ...] = names.TOKEN_BUCKETS) -> Metric:
    return _metric(name, of, f"As {of.name}, of finished requests.", buckets=buckets, where=FINISHED)


def _phases(name: str, of: Metric, phases: str, *where: tuple[str, str]) -> Metric:
    help = f"Time of finished requests in the {phases}."
    return _metric(name, of, help, buckets=_REQUEST_BUCKETS, where=FINISHED + where)


REQUESTS_RUNNING = _metric("num_requests_running", "num_running")
REQUESTS_WAITING = _metric("num_requests_waiting", "num_waiting")
WAITING_BY_REASON = _metric(
    "num_requests_waiting_by_reason",
    None,
    "Sequences in the queue. reason: deferred (waits for a prefix that is being computed or read) or capacity.",
    "reason",
)
LORA_REQUESTS = _metric(
    "lora_requests_info",
    None,
    "Adapters with sequences, separated by commas. The value is the Unix time.",
    *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
KV_CACHE_USAGE = _metric("kv_cache_usage_perc", "kv_usage", f"Same as {names.KV_CACHE_USAGE.name}.")
CACHE_CONFIG = _metric(
    "cache_config_info",
    None,
    "Block size and number of blocks of the KV cache. The value is 1.",
    *("block_size", "num_gpu_blocks"),
)
PREFIX_CACHE_QUERIES = _metric("prefix_cache_queries_total", "num_prefix_queries")
PREFIX_CACHE_HITS = _metric("prefix_cache_hits_total", "num_prefix_hits")
PREEMPTIONS = _metric("num_preemptions_total", "num_preemptions")
DRAFTS = _metric("spec_decode_num_drafts_total", "num_drafts")
DRAFT_TOKENS = _metric(
    "spec_decode_num_draft_tokens_total", "num_draft_tokens", f"The sum of {names.DRAFT_TOKENS.name}."
)
ACCEPTED_TOKENS = _metric(
    "spec_decode_num_accepted_tokens_total",
    "num_accepted_tokens",
    f"Same as {names.DRAFT_TOKENS.name} with outcome accepted.",
)
ACCEPTED_BY_POSITION = _metric(
    "spec_decode_num_accepted_tokens_per_pos_total",
    None,
    f"{names.DRAFT_TOKENS.name} with outcome accepted, by position in the draft.",
    "position",
)
PROMPT_TOKENS = _metric("prompt_tokens_total", names.PROMPT_TOKENS)
CACHED_TOKENS = _metric("prompt_tokens_cached_total", names.CACHED_PROMPT_TOKENS)
TOKENS_BY_SOURCE = _metric(
    "prompt_tokens_by_source_total",
    names.PROMPT_SOURCES,
    "Prompt tokens of ended requests. source: local_compute or local_cache_hit.",
    "source",
)
GENERATION_TOKENS = _metric("generation_tokens_total", names.GENERATION_TOKENS)
REQUEST_SUCCESS = _metric("request_success_total", names.FINISHED_CHOICES, "", "finished_reason")
TIME_TO_FIRST_TOKEN = _metric(
    "time_to_first_token_seconds", names.TIME_TO_FIRST_TOKEN_SECONDS, buckets=_TIME_TO_FIRST_TOKEN_BUCKETS
)
INTER_TOKEN_LATENCY = _metric(
    "inter_token_latency_seconds",
    names.STEP_GAP_SECONDS,
    "Time between two steps with tokens of a choice, of ended requests.",
    buckets=_INTER_TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = _finished(
    "request_time_per_output_token_seconds", names.TIME_PER_OUTPUT_TOKEN_SECONDS, _INTER_TOKEN_BUCKETS
)
DURATION = _finished("e2e_request_latency_seconds", names.DURATION_SECONDS, _REQUEST_BUCKETS)
QUEUE = _phases("request_queue_time_seconds", names.PHASE_SECONDS, "phase queue", ("phase", "queue"))
PREFILL = _phases("request_prefill_time_seconds", names.PHASE_SECONDS, "phase prefill", ("phase", "prefill"))
DECODE = _phases("request_decode_time_seconds", names.PHASE_SECONDS, "phase decode", ("phase", "decode"))
INFERENCE = _phases("request_inference_time_seconds", names.INFERENCE_SECONDS, "phases prefill and decode")
REQUEST_PROMPT_TOKENS = _finished("request_prompt_tokens", names.REQUEST_PROMPT_TOKENS)
REQUEST_COMPUTED_TOKENS = _metric(
    "request_prefill_kv_computed_tokens",
    names.COMPUTED_TOKENS,
    "Prompt tokens of finished requests that were not cached.",
    buckets=names.TOKEN_BUCKETS,
    where=FINISHED,
)
REQUEST_GENERATION_TOKENS = _finished("request_generation_tokens", names.REQUEST_GENERATION_TOKENS)
REQUEST_LONGEST_CHOICE_TOKENS = _finished("request_max_num_generation_tokens", names.REQUEST_LONGEST_CHOICE_TOKENS)
REQUEST_CHOICES = _finished("request_params_n", names.REQUEST_CHOICES, _CHOICE_BUCKETS)
REQUEST_MAX_TOKENS = _finished("request_params_max_tokens", names.REQUEST_MAX_TOKENS)
STEP_TOKENS = _metric("iteration_tokens_total", names.ENGINE_STEP_TOKENS, buckets=_STEP_BUCKETS)  # vLLM's name for it
# The name that is used by the library with which vLLM counts HTTP requests.
HTTP_REQUESTS = Metric(
    "http_requests_total",
    "counter",
    "Ended requests to the engine. handler: the route. status: 2xx, 4xx, 5xx, or none if the client left too early.",
    "",
    ("handler", "method", "status"),
    of=names.HTTP_REQUESTS,
)

METRICS = tuple(found for found in tuple(globals().values()) if isinstance(found, Metric))
