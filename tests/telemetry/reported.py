"""The metrics of plug-ins, and the names of all attributes of spans and of the metrics of the Prometheus client."""

from oaiserve.facts.fact import facts_of
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import EngineAccount, RequestRecord
from oaiserve.plugin_loading import own_plugins
from oaiserve.telemetry import names

PROCESS_METRICS = (  # on Linux
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
    *("process_start_time_seconds", "process_open_fds", "process_max_fds", "python_gc_collections_total"),
)  # fmt: skip

EVENT_DETAILS = (
    *("choice", "tokens", "start", "number", "total", "cached_tokens", "stalled_ns", "reason", "batch"),
    *("compile_ns", "cache", "kind", "encode_ns", "cached", "evicted_ns", "evicted_for"),
)
_BY_VALUE = (names.NUM_TOOL_CALLS, names.QUEUE_WAITS_NS, names.CAUSES_NS, names.GEN_AI_REQUEST_PARAMS)
_RECORDS = (RequestRecord, EngineAccount)
# NAME stands for a parameter that has no standard name.
ATTRIBUTES = frozenset(
    (
        *(names.DURATION_NS, names.REQUEST_PARAM_PREFIX + "NAME", names.URL_PATH, names.MEDIA_ENCODE_NS, *names.STEPS),
        *(
            names.GEN_AI_PROVIDER_NAME,
            names.GEN_AI_OUTPUT_TYPE,
            names.GEN_AI_REQUEST_MODEL,
            names.GEN_AI_RESPONSE_MODEL,
        ),
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK,
        *(names.EVENT_PREFIX + detail for detail in EVENT_DETAILS),
        *(name for by_value in _BY_VALUE for name in by_value.values()),
        *(row.span or row.server_span for kind in _RECORDS for row in facts_of(kind)),
    )
) - {""}


def plugin_metrics() -> list[Metric]:
    """Return the metrics of oaiserve's plug-ins."""
    return [metric for plugin in own_plugins() for metric in plugin.metrics]
