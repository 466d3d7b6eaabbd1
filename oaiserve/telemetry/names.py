"""The names of all metrics, spans and attributes, with help texts, units, labels and buckets; vLLM's are in vllm_names.

Tests compare dashboards, alert rules, the load test and the docs with this module, so a rename here fails them.
"""

from __future__ import annotations

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.fact import facts_of
from oaiserve.facts.metric import Metric, histogram, metric
from oaiserve.facts.record import Cause, Outcome, ToolCallOutcome, WaitReason, Whose

SERVICE_NAME = "oaiserve"

# -- metrics ----------------------------------------------------------------------------------------------------------

# 50 us to 30 min: a phase may be a hash lookup, or a long answer on a slow machine. Thresholds of alerts must be
# bucket boundaries.
PHASE_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)  # fmt: skip
# The next two contain every boundary of OpenTelemetry's gen_ai.server histograms, and larger ones.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 600.0),
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

_REQUEST = "outcome operation model"  # labels

# Metrics of ended requests, from their records.
PHASE_SECONDS = histogram(
    "oaiserve_request_phase_seconds",
    PHASE_BUCKETS,
    "Time that ended requests spent in each phase. A request's phases add up to its duration.",
    f"phase {_REQUEST}",
)
DURATION_SECONDS = histogram(
    "oaiserve_request_duration_seconds",
    PHASE_BUCKETS,
    "Time from the first byte of a request to the last byte of its answer.",
    _REQUEST,
)
TIME_TO_FIRST_TOKEN_SECONDS = histogram(
    "oaiserve_time_to_first_token_seconds",
    TIME_TO_FIRST_TOKEN_BUCKETS,
    "Time from the first byte of a request to its first token.",
    _REQUEST,
)
TIME_PER_OUTPUT_TOKEN_SECONDS = histogram(
    "oaiserve_time_per_output_token_seconds",
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    "Mean time between the tokens of a choice, per ended request.",
    _REQUEST,
)
INTER_TOKEN_LATENCY_SECONDS = histogram(
    "oaiserve_inter_token_latency_seconds",
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    "Time between two consecutive events of a stream that carry tokens.",
    _REQUEST,
)
EVENT_TOKENS = histogram(
    "oaiserve_event_tokens",
    STEP_TOKEN_BUCKETS,
    "Generated tokens per event of a stream.",
    _REQUEST,
)
PREEMPTION_STALL_SECONDS = histogram(
    "oaiserve_preemption_stall_seconds",
    PHASE_BUCKETS,
    "Time from preemption to resumption, per preempted request.",
    "operation model",
)
REQUEST_PROMPT_TOKENS = histogram(
    "oaiserve_request_prompt_tokens",
    TOKEN_BUCKETS,
    "Prompt tokens per ended request.",
    _REQUEST,
)
REQUEST_GENERATION_TOKENS = histogram(
    "oaiserve_request_generation_tokens",
    TOKEN_BUCKETS,
    "Generated tokens per ended request, over all choices.",
    _REQUEST,
)
REQUEST_LONGEST_CHOICE_TOKENS = histogram(
    "oaiserve_request_longest_choice_tokens",
    TOKEN_BUCKETS,
    "Generated tokens of the longest choice per ended request.",
    _REQUEST,
)
REQUEST_CHOICES = histogram(
    "oaiserve_request_choices",
    CHOICE_BUCKETS,
    "Choices per prompt (n) of ended requests.",
    _REQUEST,
    unit="choices",
)
REQUEST_MAX_TOKENS = histogram(
    "oaiserve_request_max_tokens",
    TOKEN_BUCKETS,
    "Limit (max_tokens) of ended requests that set one.",
    _REQUEST,
)
REQUESTS = metric(
    "oaiserve_requests_total",
    "Ended requests, by HTTP status and class of the error. Both may be empty.",
    f"{_REQUEST} status error_type",
)
REJECTED = metric("oaiserve_rejected_total", "Rejected requests, by class of the error.", "reason")
FINISHED_CHOICES = metric(
    "oaiserve_finished_choices_total",
    "Choices of ended requests. reason: stop, length, repetition (by repetition_detection), or abort if cancelled or "
    "failed.",
    "operation model reason",
)
LOOPS = metric(
    "oaiserve_looping_choices_total",
    "Choices of ended requests that ended in a loop: the same tokens again and again.",
    "operation model",
)
DEADLINES = metric(
    "oaiserve_deadlines_total",
    "Ended requests with a deadline. outcome: met or missed.",
    "outcome",
)
SLO_REQUESTS = metric(
    "oaiserve_slo_requests_total",
    "Finished requests with a target (--slo). slo: ttft or tpot. outcome: met or missed.",
    "slo model outcome",
)
TOOL_CALLS = metric(
    "oaiserve_tool_calls_total",
    "Tool calls in ended answers. outcome: called, unparsed (invalid, so it stayed text) or left_out (only OpenAI "
    "hosts the tool).",
    "outcome",
)
PROMPT_TOKENS = metric("oaiserve_prompt_tokens_total", "Prompt tokens of ended requests.", "operation model")
CACHED_PROMPT_TOKENS = metric(
    "oaiserve_cached_prompt_tokens_total",
    "Prompt tokens of ended requests that came from the prefix cache.",
    "operation model",
)
READ_AGAIN_TOKENS = metric(
    "oaiserve_prompt_tokens_read_again_total",
    "Prompt tokens of ended requests that were computed although an earlier prompt had computed them, by what changed.",
    "reason",
)
READ_AGAIN_SECONDS = metric(
    "oaiserve_prompt_read_again_seconds_total",
    "Part of the prefill of ended requests that computed these tokens, by what changed.",
    "reason",
)
GENERATION_TOKENS = metric(
    "oaiserve_generation_tokens_total", "Generated tokens of ended requests, over all choices.", "operation model"
)
QUEUE_WAIT_SECONDS = metric(
    "oaiserve_queue_wait_seconds_total",
    "Time that ended requests spent in the phase queue, by what they waited for.",
    "reason",
)
PHASE_CAUSE_SECONDS = metric(
    "oaiserve_phase_cause_seconds_total",
    "Time of ended requests in the phases prefill and decode, by cause. The causes of a phase add up to it. A "
    "phase receive in which the model was loaded has the causes model_load and host.",
    "phase cause",
)
# The time that clients waited for each other. `client` is the name of the API key, or "" without one.
CLIENT_WAITED_SECONDS = metric(
    "oaiserve_client_waited_seconds_total",
    "Time of a client that went to requests of others, in the queue and in steps. Its ended requests share it.",
    "client",
)
CLIENT_DELAYED_SECONDS = metric(
    "oaiserve_client_delayed_seconds_total",
    "Time of others that went to requests of a client, in the queue and in steps. Their ended requests share it.",
    "client",
)

# The cost of ended requests. `client` is the name of the API key, or "" without one.
COST_CORE_SECONDS = metric("oaiserve_cost_core_seconds_total", "CPU time that ended requests account for.", "client")
COST_MACHINE_SECONDS = metric(
    "oaiserve_cost_machine_seconds_total", "Engine time that ended requests account for.", "client"
)
COST_ALONE_SECONDS = metric(
    "oaiserve_cost_alone_seconds_total", "Engine time that ended requests would have taken alone.", "client"
)
COST_KV_BYTE_SECONDS = metric(
    "oaiserve_cost_kv_byte_seconds_total",
    "Bytes of the KV cache that ended requests held, times seconds. Requests with a shared prefix divide it.",
    "client",
)
COST_WEIGHT_BYTES = metric("oaiserve_cost_weight_bytes_total", "Bytes of weights read for ended requests.", "client")
COST_JOULES = metric(
    "oaiserve_cost_joules_total", "Energy of ended requests, where RAPL or NVML can be read.", "client"
)
COST_PRICE = metric("oaiserve_cost_price_total", "Share of ended requests in --cost-per-hour.", "client")
GRAMMAR_COMPILE_SECONDS = histogram(
    "oaiserve_grammar_compile_seconds",
    PHASE_BUCKETS,
    "Time to compile the grammar of an ended request. cache: hit or miss.",
    "cache",
)

# Metrics of the engine. They are read from its numbers at each scrape, except for the histograms, which count every
# step.
ENGINE = {
    row.name: metric(row.metric, row.meaning, of=row.name) for row in facts_of(EngineNumbers) if row.metric
}  # keyed by the field of EngineNumbers
ADAPTER_REQUESTS = metric(
    "oaiserve_adapter_requests",
    "Sequences per loaded adapter. state: running or waiting.",
    "model state",
)
KV_CACHE_USAGE = metric(
    "oaiserve_kv_cache_usage_ratio", "Share of the KV cache's blocks in use, 0 to 1.", of="kv_usage"
)
KV_BLOCKS = metric(
    "oaiserve_kv_blocks",
    "Blocks of the KV cache. state: used by sequences, cached (unused, with a cached prefix) or free. They add up "
    "to all blocks.",
    "state",
)
DRAFT_TOKENS = metric(
    "oaiserve_draft_tokens_total",
    "Tokens of drafts. outcome: accepted or rejected.",
    "outcome",
)
ENGINE_STEP_SECONDS = histogram(
    "oaiserve_engine_step_seconds",
    STEP_BUCKETS,
    "Time of the model per step, on a GPU by its own clock. kind: prefill, decode or mixed.",
    "kind",
)
ENGINE_STEP_SEQUENCES = histogram("oaiserve_engine_step_sequences", STEP_SEQUENCE_BUCKETS, "Sequences per step.")
ENGINE_STEP_TOKENS = histogram("oaiserve_engine_step_tokens", STEP_TOKEN_BUCKETS, "Tokens computed per step.")
STEP_COST_ERROR = histogram(
    "oaiserve_step_cost_error_ratio",
    ERROR_BUCKETS,
    "Error of the expected time of a step, as a share of the actual one. kind: prefill, decode or mixed.",
    "kind",
)
ENGINE_HOST_SECONDS = metric(
    "oaiserve_engine_host_seconds_total",
    "Time of the engine thread. part: idle, commands, encode, schedule, launch, masks, wait, process or hand_over.",
    "part",
)
ENGINE_FEATURE = metric(
    "oaiserve_engine_feature",
    "Whether a faster way to compute is on (1) or off (0). feature: drafts, exact; on a CPU native_step, amx; on "
    "a GPU kernels, graphs, fp8_products, state_chunks.",
    "feature",
)

# Metrics of the process.
CONNECTIONS = metric("oaiserve_connections", "Open connections.")
CONNECTIONS_REFUSED = metric(
    "oaiserve_connections_refused_total",
    "Connections that the server closed. reason: all (--max-connections), address "
    "(--max-connections-per-address), header_timeout, handshake (TLS) or invalid (HTTP).",
    "reason",
)
REFUSAL_DELAY_SECONDS = metric(
    "oaiserve_refusal_delay_seconds_total",
    "Time for which refusals, and answers to uploads, were held back, because their client had sent many.",
)
MEMORY_LIMIT = metric(
    "oaiserve_memory_limit_bytes",
    "Memory that the process may use: the machine's, or the lowest limit of its cgroups at the start.",
)
ENGINE_RESTARTS = metric(
    "oaiserve_engine_restarts_total",
    "Engine processes of --engine-process that were started because one had ended.",
)
REPLICA_UP = metric(
    "oaiserve_replica_up", "Whether a replica of --replicas has an engine process that is ready.", "replica"
)
REPLICA_RESTARTS = metric(
    "oaiserve_replica_restarts_total",
    "Engine processes of a replica that were started because one had ended.",
    "replica",
)
REPLICA_SEQUENCES = metric(
    "oaiserve_replica_sequences",
    "Sequences of a replica in its batch (running) and in its queue (waiting).",
    "replica state",
)
REPLICA_KV_USED_RATIO = metric(
    "oaiserve_replica_kv_used_ratio", "Share of the KV cache's blocks of a replica that sequences use.", "replica"
)
REPLICA_CHOICES = metric(
    "oaiserve_replica_choices_total", "Requests for which a replica was chosen, by the reason.", "replica reason"
)
METER_JOULES = metric(
    "oaiserve_meter_joules_total",
    "Energy of CPUs, memory and GPU since the start, where a meter can be read.",
)
EVENT_LOOP_LAG_SECONDS = histogram(
    "oaiserve_event_loop_lag_seconds", PHASE_BUCKETS, "Delay with which the event loop wakes a sleeping task."
)
REFUSED_ACCESS = metric(
    "oaiserve_refused_access_total",
    "Requests without access. reason: missing_key, unknown_key, role, host (--allowed-host) or origin (--cors-origin).",
    "reason",
)
BUILD_INFO = metric(
    "oaiserve_build_info",
    "Versions and the model's name. The value is 1.",
    "version python model",
)
MODEL_INFO = metric(
    "oaiserve_model_info",
    "How the model is served. The value is 1.",
    "model dtype device max_model_len block_size kv_blocks",
)

# Metrics of telemetry itself.
SCRAPE_DURATION_SECONDS = Metric("oaiserve_scrape_duration_seconds", "summary", "Time to render /metrics.", "seconds")
TELEMETRY_ERRORS = metric(
    "oaiserve_telemetry_errors_total",
    "Failures of telemetry. consumer: recent, clients, metrics, log, tracing, recording or a plug-in (plugin NAME) "
    "failed on a record; queue was full; tick failed to update the metrics.",
    "consumer",
)
SPANS = metric(
    "oaiserve_spans_total",
    "Spans. result: ended, and then exported, failed (the collector refused it) or dropped.",
    "result",
)
LOG_MESSAGES = metric(
    "oaiserve_log_messages_total",
    "Log messages by level. result: written, or left_out because there were many alike.",
    "level result",
)

METRICS: tuple[Metric, ...] = (
    *(found for found in tuple(globals().values()) if isinstance(found, Metric)),
    *ENGINE.values(),
)
# These metrics are exported only under vLLM's names.
COMPUTED_TOKENS = histogram("", (), "Prompt tokens that were not cached, per ended request.", _REQUEST, "tokens")
PROMPT_SOURCES = Metric("", "counter", "Prompt tokens, computed or cached.", "", ("source", "model"))
HTTP_REQUESTS = Metric("", "counter", "Ended requests by route.", "", ("handler", "method", "status"))
INFERENCE_SECONDS = histogram("", (), "Time in the phases prefill and decode together.", _REQUEST, "seconds")
STEP_GAP_SECONDS = histogram("", (), "Time between two steps with tokens of a choice.", _REQUEST, "seconds")

FOR_VLLM = (COMPUTED_TOKENS, PROMPT_SOURCES, HTTP_REQUESTS, INFERENCE_SECONDS, STEP_GAP_SECONDS)

# -- spans ------------------------------------------------------------------------------------------------------------
# A request is a tree of spans. The root is "{method} {route}" (SERVER), its child is "{operation} {model}" (INTERNAL),
# and the children of that are the phases. Phases are named as in oaiserve.facts.times.PHASES, and their events as in
# oaiserve.facts.record.EventKind. Each sampled step has a trace of its own. The attributes of single facts of a record
# are in its rows.

DURATION_NS = "oaiserve.duration_ns"  # duration of the span, the same integer as in the record
NUM_TOOL_CALLS = {outcome: f"oaiserve.tool_calls.{outcome}" for outcome in ToolCallOutcome}  # only if there are any
ROUTING_PREFIX = "oaiserve.routing."  # only if a router chose this replica, with the fields of its decision
REQUEST_PARAM_PREFIX = "oaiserve.request."  # prefix of parameters that have no standard name

# Attributes of the operation's span that describe the engine's steps, from the first to the last step of the request.
STEPS = (  # in the order of the fields of `Steps`
    "oaiserve.steps.first",
    "oaiserve.steps.count",
    "oaiserve.steps.mean_sequences",
    "oaiserve.steps.mean_tokens",
    "oaiserve.steps.model_ns",
    "oaiserve.steps.between_ns",  # only if there was a last token
)

# Attributes of the span of the phase `queue`: its parts, by what the request waited for.
MEDIA_ENCODE_NS = "oaiserve.media.encode_ns"
QUEUE_WAITS_NS = {reason: f"oaiserve.queue.{reason}_ns" for reason in WaitReason}

# Attributes of the spans of the phases `prefill` and `decode`: their parts that are not 0, by cause.
CAUSES_NS = {cause: f"oaiserve.cause.{cause}_ns" for cause in Cause}

# Attributes of these three spans: the time spent on others' requests, by whose they were, and the API key's name of the
# client with the largest part.
OTHERS_NS = {whose: f"oaiserve.others.{whose}_ns" for whose in Whose}
OTHERS_MOST_CLIENT = "oaiserve.others.most_client"

# Attributes of events: the choice, the details from the engine, and for a prefill chunk its number and the number of
# chunks.
EVENT_PREFIX = "oaiserve.event."

URL_PATH = "url.path"
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS = "http.response.status_code"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# The schema of the spans, from OpenTelemetry's registry for GenAI, and that of the resource. The attributes' names are
# from the registry's first release, v0.1.0. That release has no known schema URL, so this is the latest known one.
GEN_AI_SCHEMA = "https://opentelemetry.io/schemas/gen-ai-dev/1.42.0-dev"
RESOURCE_SCHEMA = "https://opentelemetry.io/schemas/1.44.0"  # The schema of GenAI builds on this one.

GEN_AI_CONVERSATION_ID = "gen_ai.conversation.id"
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_OUTPUT_TYPE = "gen_ai.output.type"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds

# Parameters that the conventions define as floats, even if a client sent an integer.
FLOATS = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty"})
# The attribute of each parameter of the API.
GEN_AI_REQUEST_PARAMS = {
    **{name: f"gen_ai.request.{name}" for name in ("max_tokens", "seed", "top_k", *FLOATS)},
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "n": "gen_ai.request.choice.count",
    "dimensions": "gen_ai.embeddings.dimension.count",
}

# -- OpenTelemetry's metrics ------------------------------------------------------------------------------------------
# These show the series above under other names, as vLLM's do. Labels whose names differ, too:
RENAMED = {
    "model_name": "model",
    "finished_reason": "reason",
    "gen_ai_operation_name": "operation",
    "gen_ai_request_model": "model",
    "gen_ai_response_model": "model",
}
# The conventions have no operations for these routes, which `http.route` distinguishes.
GEN_AI_OPERATIONS = {"messages": "chat", "responses": "chat"}
RENAMED_VALUES = {"gen_ai_operation_name": GEN_AI_OPERATIONS}
FINISHED = (("outcome", str(Outcome.FINISHED)),)  # only finished requests

_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")


def _gen_ai(
    name: str,
    of: Metric,
    help: str,
    buckets: tuple[float, ...],
    *more: str,
    where: tuple[tuple[str, str], ...] = FINISHED,
) -> Metric:
    return Metric(name, "histogram", help, "seconds", (*_GEN_AI_LABELS, *more), buckets, of=of, where=where)


# The conventions' metrics for a GenAI server, with their boundaries.
GEN_AI_REQUEST_DURATION = _gen_ai(
    "gen_ai_server_request_duration_seconds",
    DURATION_SECONDS,
    "Time from the first byte of a request to the last byte of its answer.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    "error_type",
    where=(),
)
GEN_AI_TIME_TO_FIRST_TOKEN = _gen_ai(
    "gen_ai_server_time_to_first_token_seconds",
    TIME_TO_FIRST_TOKEN_SECONDS,
    "Time from the first byte of a finished request to its first token.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TIME_PER_OUTPUT_TOKEN = _gen_ai(
    "gen_ai_server_time_per_output_token_seconds",
    TIME_PER_OUTPUT_TOKEN_SECONDS,
    "Mean time between the tokens of a choice, per finished request.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
GEN_AI_METRICS = (GEN_AI_REQUEST_DURATION, GEN_AI_TIME_TO_FIRST_TOKEN, GEN_AI_TIME_PER_OUTPUT_TOKEN)
