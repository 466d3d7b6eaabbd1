"""The metrics under vLLM's names: what they are called, their help texts, units, labels and buckets.

They show what `names` has under other names. Only the inference time is measured for its own sake.
"""

from __future__ import annotations

from oaiserve.telemetry import names

_TIME_TO_FIRST_TOKEN_BUCKETS = (*names.GEN_AI_TIME_TO_FIRST_TOKEN.buckets, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_INTER_TOKEN_BUCKETS = (*names.GEN_AI_TIME_PER_OUTPUT_TOKEN.buckets, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)  # fmt: skip


def _metric(
    name: str, type: str, help: str, *, unit: str = "", more: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> names.Metric:
    return names.Metric(f"vllm:{name}", type, help, unit, ("model_name", "engine", *more), buckets)


REQUESTS_RUNNING = _metric("num_requests_running", "gauge", "Same as oaiserve_requests_running.")
REQUESTS_WAITING = _metric("num_requests_waiting", "gauge", "Same as oaiserve_requests_waiting.")
LORA_REQUESTS = _metric(
    "lora_requests_info",
    "gauge",
    "The adapters of oaiserve_adapter_requests that have sequences, as lists with commas. The value is the Unix time.",
    more=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
KV_CACHE_USAGE = _metric("kv_cache_usage_perc", "gauge", "Same as oaiserve_kv_cache_usage_ratio.")
CACHE_CONFIG = _metric(
    "cache_config_info",
    "gauge",
    "Tokens per block and number of blocks of the KV cache. The value is 1.",
    more=("block_size", "num_gpu_blocks"),
)
PREFIX_CACHE_QUERIES = _metric(
    "prefix_cache_queries_total", "counter", "Same as oaiserve_prefix_cache_query_tokens_total."
)
PREFIX_CACHE_HITS = _metric("prefix_cache_hits_total", "counter", "Same as oaiserve_prefix_cache_hit_tokens_total.")
PREEMPTIONS = _metric("num_preemptions_total", "counter", "Same as oaiserve_preemptions_total.")
DRAFTS = _metric("spec_decode_num_drafts_total", "counter", "Same as oaiserve_drafts_total.")
DRAFT_TOKENS = _metric(
    "spec_decode_num_draft_tokens_total", "counter", "The sum of oaiserve_draft_tokens_total.", unit="tokens"
)
ACCEPTED_TOKENS = _metric(
    "spec_decode_num_accepted_tokens_total",
    "counter",
    "Same as oaiserve_draft_tokens_total of the outcome accepted.",
    unit="tokens",
)
PROMPT_TOKENS = _metric("prompt_tokens_total", "counter", "Same as oaiserve_prompt_tokens_total.", unit="tokens")
GENERATION_TOKENS = _metric(
    "generation_tokens_total", "counter", "Same as oaiserve_generation_tokens_total.", unit="tokens"
)
REQUEST_SUCCESS = _metric(
    "request_success_total", "counter", "Same as oaiserve_finished_choices_total.", more=("finished_reason",)
)
TIME_TO_FIRST_TOKEN = _metric(
    "time_to_first_token_seconds",
    "histogram",
    "Same as oaiserve_time_to_first_token_seconds.",
    unit="seconds",
    buckets=_TIME_TO_FIRST_TOKEN_BUCKETS,
)
INTER_TOKEN_LATENCY = _metric(
    "inter_token_latency_seconds",
    "histogram",
    "Same as oaiserve_inter_token_latency_seconds.",
    unit="seconds",
    buckets=_INTER_TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = _metric(
    "request_time_per_output_token_seconds",
    "histogram",
    "Same as oaiserve_time_per_output_token_seconds, for finished requests only.",
    unit="seconds",
    buckets=_INTER_TOKEN_BUCKETS,
)
DURATION = _metric(
    "e2e_request_latency_seconds",
    "histogram",
    "Same as oaiserve_request_duration_seconds, for finished requests only.",
    unit="seconds",
    buckets=_REQUEST_BUCKETS,
)
QUEUE = _metric(
    "request_queue_time_seconds",
    "histogram",
    "Time that finished requests spent in the phase queue.",
    unit="seconds",
    buckets=_REQUEST_BUCKETS,
)
PREFILL = _metric(
    "request_prefill_time_seconds",
    "histogram",
    "Time that finished requests spent in the phase prefill.",
    unit="seconds",
    buckets=_REQUEST_BUCKETS,
)
DECODE = _metric(
    "request_decode_time_seconds",
    "histogram",
    "Time that finished requests spent in the phase decode.",
    unit="seconds",
    buckets=_REQUEST_BUCKETS,
)
INFERENCE = _metric(
    "request_inference_time_seconds",
    "histogram",
    "Time that finished requests spent in the phases prefill and decode together.",
    unit="seconds",
    buckets=_REQUEST_BUCKETS,
)
REQUEST_PROMPT_TOKENS = _metric(
    "request_prompt_tokens",
    "histogram",
    "Same as oaiserve_request_prompt_tokens, for finished requests only.",
    unit="tokens",
    buckets=names.TOKEN_BUCKETS,
)
REQUEST_GENERATION_TOKENS = _metric(
    "request_generation_tokens",
    "histogram",
    "Same as oaiserve_request_generation_tokens, for finished requests only.",
    unit="tokens",
    buckets=names.TOKEN_BUCKETS,
)
REQUEST_LONGEST_CHOICE_TOKENS = _metric(
    "request_max_num_generation_tokens",
    "histogram",
    "Same as oaiserve_request_longest_choice_tokens, for finished requests only.",
    unit="tokens",
    buckets=names.TOKEN_BUCKETS,
)
REQUEST_CHOICES = _metric(
    "request_params_n",
    "histogram",
    "Same as oaiserve_request_choices, for finished requests only.",
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0),
)
REQUEST_MAX_TOKENS = _metric(
    "request_params_max_tokens",
    "histogram",
    "Same as oaiserve_request_max_tokens, for finished requests only.",
    unit="tokens",
    buckets=names.TOKEN_BUCKETS,
)
# A histogram, although vLLM's name for it ends as a counter's.
STEP_TOKENS = _metric(
    "iteration_tokens_total",
    "histogram",
    "Same as oaiserve_engine_step_tokens.",
    buckets=(1.0, *(float(2**exponent) for exponent in range(3, 15))),
)

# These are on /metrics only, and only with --vllm-metrics.
METRICS = (
    *(REQUESTS_RUNNING, REQUESTS_WAITING, LORA_REQUESTS, KV_CACHE_USAGE, CACHE_CONFIG),
    *(PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS, PREEMPTIONS),
    *(DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS),
    *(PROMPT_TOKENS, GENERATION_TOKENS, REQUEST_SUCCESS),
    *(TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, TIME_PER_OUTPUT_TOKEN, DURATION),
    *(QUEUE, PREFILL, DECODE, INFERENCE),
    *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS, REQUEST_LONGEST_CHOICE_TOKENS),
    *(REQUEST_CHOICES, REQUEST_MAX_TOKENS, STEP_TOKENS),
)  # fmt: skip
