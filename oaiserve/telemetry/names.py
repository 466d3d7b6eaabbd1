"""Every metric, span and attribute name, with help, unit, labels and buckets. Data only.

Dashboards, alert rules, the load test and the docs are checked against this module, so a rename shows up there.
"""

from __future__ import annotations

from dataclasses import dataclass

SERVICE_NAME = "oaiserve"

# -- metrics ----------------------------------------------------------------------------------------------------------

# 50 us to 5 min: a phase may be a hash lookup or a long wait. Alerts can only use thresholds that stand here.
PHASE_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0),
)  # fmt: skip
# These two contain every boundary of OpenTelemetry's gen_ai.server histograms, and go on where those stop.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0),
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN_BUCKETS = (
    *(0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is what a dashboard writes, `_total` included; a histogram adds `_bucket`, `_sum` and `_count`."""

    name: str
    type: str  # "counter" | "gauge" | "histogram" | "summary" | "info"
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_REQUEST = ("outcome", "operation", "model")

PHASE_SECONDS = Metric(
    "oaiserve_request_phase_seconds",
    "histogram",
    "Time of ended requests by phase. The phases of a request touch and add up to its duration.",
    "seconds",
    ("phase", *_REQUEST),
    PHASE_BUCKETS,
)
DURATION_SECONDS = Metric(
    "oaiserve_request_duration_seconds",
    "histogram",
    "Time from the first byte of a request to the last byte of its answer.",
    "seconds",
    _REQUEST,
    PHASE_BUCKETS,
)
TIME_TO_FIRST_TOKEN_SECONDS = Metric(
    "oaiserve_time_to_first_token_seconds",
    "histogram",
    "Time from the first byte of a request to its first token.",
    "seconds",
    _REQUEST,
    TIME_TO_FIRST_TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN_SECONDS = Metric(
    "oaiserve_time_per_output_token_seconds",
    "histogram",
    "Mean time between the tokens of a choice, one value for each request with two tokens or more per choice.",
    "seconds",
    _REQUEST,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
)
PREEMPTION_STALL_SECONDS = Metric(
    "oaiserve_preemption_stall_seconds",
    "histogram",
    "Time that a request stood still because its blocks were needed, one value for each request that was preempted.",
    "seconds",
    ("operation", "model"),
    PHASE_BUCKETS,
)
REQUESTS = Metric(
    "oaiserve_requests_total",
    "counter",
    "Ended requests. status is the HTTP status sent, or empty; error_type is the kind of error, or empty.",
    labels=(*_REQUEST, "status", "error_type"),
)
PROMPT_TOKENS = Metric(
    "oaiserve_prompt_tokens_total", "counter", "Prompt tokens of ended requests.", "tokens", ("operation", "model")
)
CACHED_PROMPT_TOKENS = Metric(
    "oaiserve_cached_prompt_tokens_total",
    "counter",
    "Prompt tokens of ended requests that the prefix cache held already.",
    "tokens",
    ("operation", "model"),
)
GENERATION_TOKENS = Metric(
    "oaiserve_generation_tokens_total",
    "counter",
    "Generated tokens of ended requests, all choices.",
    "tokens",
    ("operation", "model"),
)

# Read from the engine's snapshot when a scrape comes.
REQUESTS_RUNNING = Metric("oaiserve_requests_running", "gauge", "Sequences that take part in steps.")
REQUESTS_WAITING = Metric("oaiserve_requests_waiting", "gauge", "Sequences in the engine's queue.")
KV_CACHE_USAGE = Metric(
    "oaiserve_kv_cache_usage_ratio", "gauge", "Share of the KV cache's blocks in use, 0 to 1.", "ratio"
)
KV_BLOCKS = Metric("oaiserve_kv_blocks", "gauge", "Blocks of the KV cache; state: used or free.", "blocks", ("state",))
PREEMPTIONS = Metric("oaiserve_preemptions_total", "counter", "Sequences put back to the queue for lack of blocks.")
ENGINE_STEPS = Metric("oaiserve_engine_steps_total", "counter", "Steps of the engine.")
TOKENIZE_QUEUE_DEPTH = Metric(
    "oaiserve_tokenize_queue_depth", "gauge", "Requests that no tokenize worker has taken yet."
)

EVENT_LOOP_LAG_SECONDS = Metric(
    "oaiserve_event_loop_lag_seconds",
    "histogram",
    "How much later than asked the event loop wakes a sampler up.",
    "seconds",
    buckets=PHASE_BUCKETS,
)
BUILD_INFO = Metric(
    "oaiserve_build_info", "info", "What runs here. The value is 1.", labels=("version", "python", "model")
)

# Telemetry's account of itself.
SCRAPE_DURATION_SECONDS = Metric("oaiserve_scrape_duration_seconds", "summary", "Time to render /metrics.", "seconds")
TELEMETRY_ERRORS = Metric(
    "oaiserve_telemetry_errors_total",
    "counter",
    "Ended requests of which a consumer (metrics, tracing, log) failed, or that found the queue full.",
    labels=("consumer",),
)
SPANS = Metric(
    "oaiserve_spans_total",
    "counter",
    "Spans by result: ended, then exported or failed. Ended ones that never get there were dropped.",
    labels=("result",),
)

METRICS = (
    *(PHASE_SECONDS, DURATION_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS, TIME_PER_OUTPUT_TOKEN_SECONDS),
    *(PREEMPTION_STALL_SECONDS, REQUESTS),
    *(PROMPT_TOKENS, CACHED_PROMPT_TOKENS, GENERATION_TOKENS, REQUESTS_RUNNING, REQUESTS_WAITING, KV_CACHE_USAGE),
    *(KV_BLOCKS, PREEMPTIONS, ENGINE_STEPS, TOKENIZE_QUEUE_DEPTH, EVENT_LOOP_LAG_SECONDS, BUILD_INFO),
    *(SCRAPE_DURATION_SECONDS, TELEMETRY_ERRORS, SPANS),
)  # fmt: skip

# Standard names that come with the Prometheus client, on Linux.
PROCESS_METRICS = (
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
    *("process_start_time_seconds", "process_open_fds", "process_max_fds", "python_gc_collections_total"),
)  # fmt: skip

# -- spans ------------------------------------------------------------------------------------------------------------
# "{method} {route}" (SERVER), under it "{operation} {model}" (INTERNAL), under that one span per phase, named as
# the phase is in oaiserve.times.PHASES.

REQUEST_ID = "oaiserve.request.id"
OUTCOME = "oaiserve.outcome"
NUM_PREEMPTIONS = "oaiserve.preemptions"  # only where there were any
STALLED_NS = "oaiserve.preemption_stall_ns"
DURATION_NS = "oaiserve.duration_ns"  # of the span it stands on, the integer of the record
REQUEST_PARAM_PREFIX = "oaiserve.request."  # for parameters that have no standard name

HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
URL_PATH = "url.path"
ERROR_TYPE = "error.type"

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# The API's parameter -> its attribute.
GEN_AI_REQUEST_PARAMS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
