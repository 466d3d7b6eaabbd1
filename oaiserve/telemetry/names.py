"""The names of all metrics, spans and attributes, with help texts, units, labels and buckets; vLLM's are in vllm_names.

Tests compare dashboards, alert rules, the load test and the docs with this module, so a rename here fails them.
"""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.facts.record import Cause, HostPart, ToolCallOutcome, WaitReason

SERVICE_NAME = "oaiserve"

# -- metrics ----------------------------------------------------------------------------------------------------------

# 50 us to 5 min: a phase may be a hash lookup or a long wait. The thresholds of alerts must be among these values.
PHASE_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0),
)  # fmt: skip
# The next two contain every boundary of OpenTelemetry's gen_ai.server histograms, and continue beyond these.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0),
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN_BUCKETS = (
    *(0.00005, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)  # fmt: skip
STEP_BUCKETS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)  # fmt: skip
TOKEN_BUCKETS = (*(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5)), 1e6)
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
STEP_SEQUENCE_BUCKETS = tuple(float(2**exponent) for exponent in range(11))  # 1 to 1024
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
STEP_TOKEN_BUCKETS = tuple(float(2**exponent) for exponent in range(15))  # 1 to 16384


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as Prometheus names it: a counter ends in `_total`, a histogram gets `_bucket`, `_sum` and `_count`."""

    name: str
    type: str  # "counter" | "gauge" | "histogram" | "summary" | "info"
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    otel_name: str = ""  # the name over OTLP; if empty, it is `name` without `_total`


_REQUEST = ("outcome", "operation", "model")

# Metrics of ended requests, from their records.
PHASE_SECONDS = Metric(
    "oaiserve_request_phase_seconds",
    "histogram",
    "Time that ended requests spent in each phase. The phases of a request add up to its duration.",
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
    "Mean time between the tokens of a choice, one value per request with at least two tokens per choice.",
    "seconds",
    _REQUEST,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
)
INTER_TOKEN_LATENCY_SECONDS = Metric(
    "oaiserve_inter_token_latency_seconds",
    "histogram",
    "Time between two consecutive tokens of a choice, for each pair of tokens of ended requests.",
    "seconds",
    _REQUEST,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
)
PREEMPTION_STALL_SECONDS = Metric(
    "oaiserve_preemption_stall_seconds",
    "histogram",
    "Time from preemption until a sequence is computed again, added up per request, for preempted requests only.",
    "seconds",
    ("operation", "model"),
    PHASE_BUCKETS,
)
REQUEST_PROMPT_TOKENS = Metric(
    "oaiserve_request_prompt_tokens",
    "histogram",
    "Prompt tokens per ended request. Requests that did not get past tokenization are left out.",
    "tokens",
    _REQUEST,
    TOKEN_BUCKETS,
)
REQUEST_GENERATION_TOKENS = Metric(
    "oaiserve_request_generation_tokens",
    "histogram",
    "Generated tokens per ended request, over all choices. Requests that did not get past tokenization are left out.",
    "tokens",
    _REQUEST,
    TOKEN_BUCKETS,
)
REQUEST_LONGEST_CHOICE_TOKENS = Metric(
    "oaiserve_request_longest_choice_tokens",
    "histogram",
    "Generated tokens of the longest choice per ended request. Requests that did not get past tokenization are left "
    "out.",
    "tokens",
    _REQUEST,
    TOKEN_BUCKETS,
)
REQUEST_CHOICES = Metric(
    "oaiserve_request_choices",
    "histogram",
    "Choices for each prompt that ended requests asked for (n). Requests that did not get past tokenization are left "
    "out.",
    "choices",
    _REQUEST,
    CHOICE_BUCKETS,
)
REQUEST_MAX_TOKENS = Metric(
    "oaiserve_request_max_tokens",
    "histogram",
    "Limit on the tokens of an answer, of ended requests that set one (max_tokens). Requests that did not get past "
    "tokenization are left out.",
    "tokens",
    _REQUEST,
    TOKEN_BUCKETS,
)
REQUESTS = Metric(
    "oaiserve_requests_total",
    "counter",
    "Ended requests. status: the HTTP status, empty if none was sent. error_type: the class of the error, or empty.",
    labels=(*_REQUEST, "status", "error_type"),
)
REJECTED = Metric(
    "oaiserve_rejected_total",
    "counter",
    "Rejected requests, by the class of the error.",
    labels=("reason",),
)
FINISHED_CHOICES = Metric(
    "oaiserve_finished_choices_total",
    "counter",
    "Choices of ended requests. reason: stop, length, or abort for unfinished ones of a cancelled or failed request.",
    labels=("operation", "model", "reason"),
)
TOOL_CALLS = Metric(
    "oaiserve_tool_calls_total",
    "counter",
    "Calls of tools in ended answers. outcome: called, or unparsed if it stayed text because it was no valid call.",
    labels=("outcome",),
)
PROMPT_TOKENS = Metric(
    "oaiserve_prompt_tokens_total", "counter", "Prompt tokens of ended requests.", "tokens", ("operation", "model")
)
CACHED_PROMPT_TOKENS = Metric(
    "oaiserve_cached_prompt_tokens_total",
    "counter",
    "Prompt tokens of ended requests that were found in the prefix cache.",
    "tokens",
    ("operation", "model"),
)
GENERATION_TOKENS = Metric(
    "oaiserve_generation_tokens_total",
    "counter",
    "Generated tokens of ended requests, over all choices.",
    "tokens",
    ("operation", "model"),
)
QUEUE_WAIT_SECONDS = Metric(
    "oaiserve_queue_wait_seconds_total",
    "counter",
    "Time that ended requests spent in the phase queue, by what they waited for.",
    "seconds",
    ("reason",),
)
PHASE_CAUSE_SECONDS = Metric(
    "oaiserve_phase_cause_seconds_total",
    "counter",
    "Time that ended requests spent in the phases prefill and decode, by its cause: alone, neighbour_decodes, "
    "neighbour_prompts, preemption, constraint, host, machine or unexplained. The causes of a phase add up to it.",
    "seconds",
    ("phase", "cause"),
)
GRAMMAR_COMPILE_SECONDS = Metric(
    "oaiserve_grammar_compile_seconds",
    "histogram",
    "Time to compile the grammar of an ended request, within the phase tokenize. cache: hit, if an earlier request had "
    "the same grammar, or miss.",
    "seconds",
    ("cache",),
    PHASE_BUCKETS,
)

# Metrics of the engine. They are read from its snapshot at each scrape, except the histograms, which have every step.
REQUESTS_RUNNING = Metric("oaiserve_requests_running", "gauge", "Sequences that take part in steps of the engine.")
REQUESTS_WAITING = Metric("oaiserve_requests_waiting", "gauge", "Sequences in the engine's queue.")
ADAPTER_REQUESTS = Metric(
    "oaiserve_adapter_requests",
    "gauge",
    "Sequences of each adapter that is loaded, by its name. state: running, in steps of the engine; waiting, in its "
    "queue.",
    labels=("model", "state"),
)
WAITING_PROMPT_TOKENS = Metric(
    "oaiserve_waiting_prompt_tokens", "gauge", "Prompt tokens of requests that have not entered a step.", "tokens"
)
DRAIN_RATE = Metric(
    "oaiserve_drain_rate_requests_per_second",
    "gauge",
    "Requests that leave the queue per second, as last measured while requests were waiting.",
)
TOKENIZE_QUEUE_DEPTH = Metric(
    "oaiserve_tokenize_queue_depth",
    "gauge",
    "Requests, also to /tokenize and /detokenize, that no tokenize worker has begun yet.",
)
KV_CACHE_USAGE = Metric(
    "oaiserve_kv_cache_usage_ratio", "gauge", "Share of the KV cache's blocks in use, 0 to 1.", "ratio"
)
KV_BLOCKS = Metric(
    "oaiserve_kv_blocks",
    "gauge",
    "Blocks of the KV cache. state: used by sequences; cached, which is unused but kept by the prefix cache; free. "
    "The three add up to all blocks.",
    "blocks",
    ("state",),
)
PREFIX_CACHE_QUERY_TOKENS = Metric(
    "oaiserve_prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.", "tokens"
)
PREFIX_CACHE_HIT_TOKENS = Metric(
    "oaiserve_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache.", "tokens"
)
PREEMPTIONS = Metric(
    "oaiserve_preemptions_total",
    "counter",
    "Preemptions: sequences put back into the queue because the KV cache had no free block.",
)
ENGINE_OUT_OF_MEMORY = Metric(
    "oaiserve_engine_out_of_memory_total",
    "counter",
    "Steps for which the GPU ran out of memory, so that they were computed in parts.",
)
GRAMMAR_MASKED_DRAWS = Metric(
    "oaiserve_grammar_masked_draws_total",
    "counter",
    "Tokens drawn from those that a grammar lets come next, those behind a draft that did not come true included. The "
    "time to find which may come is the part masks of oaiserve_engine_host_seconds_total.",
)
GRAMMAR_FORCED_TOKENS = Metric(
    "oaiserve_grammar_forced_tokens_total",
    "counter",
    "Tokens that were not drawn, because a grammar left no other.",
    "tokens",
)
DRAFTS = Metric(
    "oaiserve_drafts_total",
    "counter",
    "Drafts that steps have verified: guesses at the next tokens of a sequence.",
)
DRAFT_TOKENS = Metric(
    "oaiserve_draft_tokens_total",
    "counter",
    "Tokens of drafts. lookup: they were found in the sequence's own text. model: the draft model guessed them. "
    "accepted: they came true, so the answer has them. rejected: they were computed in vain.",
    "tokens",
    labels=("source", "outcome"),
)
ENGINE_STEPS = Metric("oaiserve_engine_steps_total", "counter", "Steps of the engine.")
ENGINE_STEP_SECONDS = Metric(
    "oaiserve_engine_step_seconds",
    "histogram",
    "Time that the model took for a step, on a GPU by the GPU's clock. kind: prefill, decode or mixed.",
    "seconds",
    ("kind",),
    STEP_BUCKETS,
)
ENGINE_STEP_SEQUENCES = Metric(
    "oaiserve_engine_step_sequences",
    "histogram",
    "Sequences in a step.",
    "sequences",
    buckets=STEP_SEQUENCE_BUCKETS,
)
ENGINE_STEP_TOKENS = Metric(
    "oaiserve_engine_step_tokens", "histogram", "Tokens computed in a step.", "tokens", buckets=STEP_TOKEN_BUCKETS
)
STEP_COST_ERROR = Metric(
    "oaiserve_step_cost_error_ratio",
    "histogram",
    "How far the time that a step was expected to take is from what it took, as a share of that. kind: prefill, decode "
    "or mixed.",
    "ratio",
    ("kind",),
    ERROR_BUCKETS,
)
ENGINE_MODEL_SECONDS = Metric(
    "oaiserve_engine_model_seconds_total",
    "counter",
    "Time that the model took, over all steps. On a GPU it is the time that the GPU was busy, by its own clock.",
    "seconds",
)
ENGINE_IDLE_WITH_WORK_SECONDS = Metric(
    "oaiserve_engine_idle_with_work_seconds_total",
    "counter",
    "Time between steps while there was work: the engine thread's own work and its waits for a core. On a GPU it is "
    "the time that the GPU waited for the next launch, by its own clock.",
    "seconds",
)
ENGINE_HOST_SECONDS = Metric(
    "oaiserve_engine_host_seconds_total",
    "counter",
    "Time of the engine thread by what it did: idle, commands, schedule, draft, launch, masks, wait, process or "
    "hand_over. The parts add up to all of its time.",
    "seconds",
    ("part",),
)
ENGINE_FEATURE = Metric(
    "oaiserve_engine_feature",
    "gauge",
    "1 for a faster way to compute that is on, 0 for one that is off, because it was not asked for or failed its check "
    "at the start. On a GPU. feature: attention, sampling (by kernels of their own), packed_weights, "
    "fp8_products, packed_experts, one_shot_sums, fused_projections, fused_layers, compiled_layers, adapters, "
    "decode_graphs or prompt_graphs.",
    labels=("feature",),
)

# Metrics of the process.
CONNECTIONS = Metric("oaiserve_connections", "gauge", "Open connections, those in a TLS handshake included.")
CONNECTIONS_REFUSED = Metric(
    "oaiserve_connections_refused_total",
    "counter",
    "Connections that the server closed against the client's will. reason: all (--max-connections), address "
    "(--max-connections-per-address), header_timeout, handshake (TLS: failed or too late), invalid (broken HTTP, or "
    "headers that are too large).",
    labels=("reason",),
)
FRONT_ENDS = Metric("oaiserve_front_ends", "gauge", "Front ends that serve now (--front-ends).")
FRONT_ENDS_ENDED = Metric(
    "oaiserve_front_ends_ended_total", "counter", "Front ends that ended while the server went on, and start again."
)
FRONT_END_CPU_SECONDS = Metric(
    "oaiserve_front_end_cpu_seconds_total",
    "counter",
    "CPU time of each front end, by its number, since it was started last. That of the engine's process is "
    "process_cpu_seconds_total.",
    labels=("front_end",),
)
FRONT_END_RESIDENT_BYTES = Metric(
    "oaiserve_front_end_resident_memory_bytes", "gauge", "Memory of each front end.", "bytes", labels=("front_end",)
)
FRONT_END_OPEN_FDS = Metric(
    "oaiserve_front_end_open_fds", "gauge", "Open files and sockets of each front end.", labels=("front_end",)
)
STORED_RESPONSES = Metric(
    "oaiserve_stored_responses",
    "gauge",
    "Answers of /v1/responses in the store. If processes share a file, those of all, as of this one's last use of it.",
)
STORED_RESPONSE_BYTES = Metric(
    "oaiserve_stored_response_bytes", "gauge", "Bytes of the answers in the store and of their inputs.", "bytes"
)
STORED_RESPONSES_DROPPED = Metric(
    "oaiserve_stored_responses_dropped_total",
    "counter",
    "Answers of /v1/responses that the store dropped. reason: age (--response-store-seconds), room (others needed it: "
    "--response-store-number, --response-store-bytes) or size (larger than the whole store).",
    labels=("reason",),
)
EVENT_LOOP_LAG_SECONDS = Metric(
    "oaiserve_event_loop_lag_seconds",
    "histogram",
    "Delay with which the event loop wakes up a sleeping task.",
    "seconds",
    buckets=PHASE_BUCKETS,
)
REFUSED_ACCESS = Metric(
    "oaiserve_refused_access_total",
    "counter",
    "Requests refused before they reached a route. reason: missing_key, unknown_key, host (a name that the server does "
    "not answer to) or origin (a web page of another site).",
    labels=("reason",),
)
BUILD_INFO = Metric(
    "oaiserve_build_info",
    "info",
    "Versions of oaiserve and Python, and the model's name. The value is 1.",
    labels=("version", "python", "model"),
)
MODEL_INFO = Metric(
    "oaiserve_model_info",
    "info",
    "How the model is served. A label is empty if its value is unknown. The value is 1.",
    labels=("model", "dtype", "device", "max_model_len", "block_size", "kv_blocks"),
)

# Metrics of telemetry itself.
SCRAPE_DURATION_SECONDS = Metric("oaiserve_scrape_duration_seconds", "summary", "Time to render /metrics.", "seconds")
TELEMETRY_ERRORS = Metric(
    "oaiserve_telemetry_errors_total",
    "counter",
    "Failures of telemetry by consumer. recent, metrics, log, tracing, recording: it failed on a record. queue: a "
    "record was dropped because the queue was full. tick: the periodic update of the metrics failed.",
    labels=("consumer",),
)
SPANS = Metric(
    "oaiserve_spans_total",
    "counter",
    "Spans by result. Each span is counted as ended, and then as exported, failed (the collector did not accept it) or "
    "dropped (the queue was full, or the time at shutdown too short).",
    labels=("result",),
)
LOG_MESSAGES = Metric(
    "oaiserve_log_messages_total",
    "counter",
    "Messages of the log by level. result: written; left_out, because there were many of the same kind.",
    labels=("level", "result"),
)

METRICS = (
    *(PHASE_SECONDS, DURATION_SECONDS, TIME_TO_FIRST_TOKEN_SECONDS, TIME_PER_OUTPUT_TOKEN_SECONDS),
    *(INTER_TOKEN_LATENCY_SECONDS, PREEMPTION_STALL_SECONDS, REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS),
    *(REQUEST_LONGEST_CHOICE_TOKENS, REQUEST_CHOICES, REQUEST_MAX_TOKENS),
    *(REQUESTS, REJECTED, FINISHED_CHOICES, TOOL_CALLS, PROMPT_TOKENS, CACHED_PROMPT_TOKENS, GENERATION_TOKENS),
    *(QUEUE_WAIT_SECONDS, PHASE_CAUSE_SECONDS, GRAMMAR_COMPILE_SECONDS),
    *(REQUESTS_RUNNING, REQUESTS_WAITING, ADAPTER_REQUESTS, WAITING_PROMPT_TOKENS, DRAIN_RATE),
    *(TOKENIZE_QUEUE_DEPTH, KV_CACHE_USAGE, KV_BLOCKS, PREFIX_CACHE_QUERY_TOKENS, PREFIX_CACHE_HIT_TOKENS),
    *(PREEMPTIONS, ENGINE_OUT_OF_MEMORY, GRAMMAR_MASKED_DRAWS, GRAMMAR_FORCED_TOKENS, DRAFTS, DRAFT_TOKENS),
    *(ENGINE_STEPS, ENGINE_STEP_SECONDS, ENGINE_STEP_SEQUENCES, ENGINE_STEP_TOKENS, STEP_COST_ERROR),
    *(ENGINE_MODEL_SECONDS, ENGINE_IDLE_WITH_WORK_SECONDS, ENGINE_HOST_SECONDS, ENGINE_FEATURE),
    EVENT_LOOP_LAG_SECONDS,
    *(CONNECTIONS, CONNECTIONS_REFUSED, REFUSED_ACCESS),
    *(FRONT_ENDS, FRONT_ENDS_ENDED, FRONT_END_CPU_SECONDS, FRONT_END_RESIDENT_BYTES, FRONT_END_OPEN_FDS),
    *(STORED_RESPONSES, STORED_RESPONSE_BYTES, STORED_RESPONSES_DROPPED),
    *(BUILD_INFO, MODEL_INFO, SCRAPE_DURATION_SECONDS, TELEMETRY_ERRORS, SPANS, LOG_MESSAGES),
)  # fmt: skip

# Standard metrics that the Prometheus client adds on Linux.
PROCESS_METRICS = (
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
    *("process_start_time_seconds", "process_open_fds", "process_max_fds", "python_gc_collections_total"),
)  # fmt: skip

# -- spans ------------------------------------------------------------------------------------------------------------
# A request is a tree of spans. The root is "{method} {route}" (SERVER), its child is "{operation} {model}" (INTERNAL),
# and the children of that are the phases. Phases are named as in oaiserve.facts.times.PHASES, and their events as in
# oaiserve.facts.record.EventKind. Each sampled step has a trace of its own.

REQUEST_ID = "oaiserve.request.id"
OUTCOME = "oaiserve.outcome"
CLIENT = "oaiserve.client"  # the name of the API key; only if the server asks for keys
NUM_PREEMPTIONS = "oaiserve.preemptions"  # only if the request was preempted
STALLED_NS = "oaiserve.preemption_stall_ns"
DURATION_NS = "oaiserve.duration_ns"  # duration of the span, the same integer as in the record
GRAMMAR_KIND = "oaiserve.grammar.kind"  # this and the next two only if a grammar constrains the answer
NUM_MASKED_DRAWS = "oaiserve.grammar.masked_draws"
NUM_FORCED_TOKENS = "oaiserve.grammar.forced_tokens"
NUM_DRAFT_TOKENS = "oaiserve.draft.tokens"  # this and the next one only if drafts were verified
NUM_ACCEPTED_TOKENS = "oaiserve.draft.accepted_tokens"
NUM_TOOL_CALLS = {outcome: f"oaiserve.tool_calls.{outcome}" for outcome in ToolCallOutcome}  # only if there are any
EVENTS_DROPPED = "oaiserve.events_dropped"  # only if there were more than oaiserve.facts.record.MOST_EVENTS
ROUTING_PREFIX = "oaiserve.routing."  # only if a router chose this replica, with the fields of its decision
REQUEST_PARAM_PREFIX = "oaiserve.request."  # prefix of parameters that have no standard name

# Attributes of the operation's span: the engine's steps from the first to the last one of the request.
STEPS_FIRST = "oaiserve.steps.first"
STEPS_COUNT = "oaiserve.steps.count"
STEPS_MEAN_SEQUENCES = "oaiserve.steps.mean_sequences"
STEPS_MEAN_TOKENS = "oaiserve.steps.mean_tokens"
STEPS_MODEL_NS = "oaiserve.steps.model_ns"
STEPS_BETWEEN_NS = "oaiserve.steps.between_ns"  # only if there was a last token

# Attributes of the span of a step.
STEP_SPAN = "engine step"
STEP_NUMBER = "oaiserve.step.number"
STEP_KIND = "oaiserve.step.kind"
STEP_SEQUENCES = "oaiserve.step.sequences"
STEP_TOKENS = "oaiserve.step.tokens"
STEP_MASKED_DRAWS = "oaiserve.step.masked_draws"
STEP_IDLE_NS = "oaiserve.step.idle_ns"
STEP_DEVICE_BUSY_NS = "oaiserve.step.device_busy_ns"  # this and the next only if the device has a clock
STEP_DEVICE_GAP_NS = "oaiserve.step.device_gap_ns"
STEP_HOST_NS = {part: f"oaiserve.step.host.{part}_ns" for part in HostPart}

# Attributes of the span of the phase `queue`: its parts, by what the request waited for.
QUEUE_WAITS_NS = {reason: f"oaiserve.queue.{reason}_ns" for reason in WaitReason}

# Attributes of the spans of the phases `prefill` and `decode`: their parts, by cause; only those that are not 0.
CAUSES_NS = {cause: f"oaiserve.cause.{cause}_ns" for cause in Cause}

# Attributes of events: the choice, the details that the engine noted, and for a prefill chunk its number and the total.
EVENT_PREFIX = "oaiserve.event."
EVENT_DETAILS = (
    *("choice", "tokens", "start", "number", "total", "cached_tokens", "stalled_ns", "reason", "batch"),
    *("compile_ns", "cache", "kind"),
)

HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_CONVERSATION_ID = "gen_ai.conversation.id"
GEN_AI_OUTPUT_TYPE = "gen_ai.output.type"
GEN_AI_INPUT_MESSAGES = "gen_ai.input.messages"  # only with --trace-prompt-characters
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# The attribute of each parameter of the API.
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
    "dimensions": "gen_ai.embeddings.dimension.count",
}

# -- OpenTelemetry's metrics ------------------------------------------------------------------------------------------
# These show the measurements above under other names.

_GEN_AI_ATTRIBUTES = (GEN_AI_OPERATION_NAME, GEN_AI_PROVIDER_NAME, GEN_AI_REQUEST_MODEL, GEN_AI_RESPONSE_MODEL)


def _gen_ai(name: str, help: str, buckets: tuple[float, ...], *more: str) -> Metric:
    labels = tuple(attribute.replace(".", "_") for attribute in (*_GEN_AI_ATTRIBUTES, *more))
    return Metric(name.replace(".", "_") + "_seconds", "histogram", help, "seconds", labels, buckets, otel_name=name)


# Those of the conventions for a GenAI server, with the boundaries of the conventions.
GEN_AI_REQUEST_DURATION = _gen_ai(
    "gen_ai.server.request.duration",
    "Time from the first byte of a request to the last byte of its answer.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ERROR_TYPE,
)
GEN_AI_TIME_TO_FIRST_TOKEN = _gen_ai(
    "gen_ai.server.time_to_first_token",
    "Time from the first byte of a finished request to its first token.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TIME_PER_OUTPUT_TOKEN = _gen_ai(
    "gen_ai.server.time_per_output_token",
    "Mean time between the tokens of a choice, one value per finished request with at least two tokens per choice.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
GEN_AI_METRICS = (GEN_AI_REQUEST_DURATION, GEN_AI_TIME_TO_FIRST_TOKEN, GEN_AI_TIME_PER_OUTPUT_TOKEN)
# Over OTLP the labels of these metrics have the names of the conventions, too.
OTEL_ATTRIBUTES = {attribute.replace(".", "_"): attribute for attribute in (*_GEN_AI_ATTRIBUTES, ERROR_TYPE)}
