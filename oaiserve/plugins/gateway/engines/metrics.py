"""The metrics of a gateway in front of foreign engines: those of its requests have the label `engine`, the engine's
number, and there are no others than those that can be known from outside."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oaiserve.facts.metric import Metric, metric
from oaiserve.facts.record import RequestRecord
from oaiserve.plugins.gateway.engines.engine import ForeignEngine
from oaiserve.telemetry import names
from oaiserve.telemetry.request_series import RequestSeries
from oaiserve.telemetry.series import LabelValues, Number, Origin

ENGINE = "engine"  # the label
_OPERATION = "operation"  # Metrics with this label are of requests, which have an engine.
# Metrics that only an engine of oaiserve can measure. The page leaves them out.
_OF_OUR_ENGINE = frozenset(
    {
        *names.ENGINE.values(),
        *(names.ADAPTER_REQUESTS, names.KV_CACHE_USAGE, names.KV_BLOCKS, names.DRAFT_TOKENS, names.ENGINE_HOST_SECONDS),
        *(names.ENGINE_STEP_SECONDS, names.ENGINE_STEP_SEQUENCES, names.ENGINE_STEP_TOKENS, names.STEP_COST_ERROR),
        *(names.ENGINE_FEATURE, names.MODEL_INFO, names.METER_JOULES, names.GRAMMAR_COMPILE_SECONDS),
        *(names.EVENT_TOKENS, names.EVENT_LOOP_LAG_SECONDS, names.ENGINE_RESTARTS),
        *(names.PREEMPTION_STALL_SECONDS, names.QUEUE_WAIT_SECONDS, names.LOOPS, names.TOOL_CALLS),
        *(names.COST_CORE_SECONDS, names.COST_MACHINE_SECONDS, names.COST_ALONE_SECONDS, names.COST_KV_BYTE_SECONDS),
        *(names.COST_WEIGHT_BYTES, names.COST_JOULES, names.COST_PRICE, names.READ_AGAIN_SECONDS),
    }
) - {names.ENGINE["num_running"], names.ENGINE["num_waiting"]}

INFO = metric(
    "oaiserve_engine_info",
    "Engines behind this gateway, by what they say about themselves. The value is 1.",
    "engine kind version model",
)
UP = metric("oaiserve_engine_up", "Whether an engine has answered when it was last asked, and was ready.", ENGINE)
OPEN = metric(
    "oaiserve_engine_open_requests", "Requests of a client that an engine has not completed.", f"{ENGINE} client"
)
UNREAD = metric(
    "oaiserve_engine_unread_answers_total",
    "Answers that were passed on and could not be read, so that only their times and status are known.",
    ENGINE,
)
REPORTED = metric(
    "oaiserve_engine_reported_requests",
    "Requests at an engine by its own metrics, also of other clients of it. state: running or waiting.",
    f"{ENGINE} state",
)
PREEMPTIONS = metric(
    "oaiserve_engine_reported_preemptions_total", "Preemptions at an engine by its own metrics.", ENGINE
)
CACHE_TOKENS = metric(
    "oaiserve_engine_reported_cache_tokens_total",
    "Prompt tokens at an engine by its own metrics. result: queried, in its prefix cache, and hit, found there.",
    f"{ENGINE} result",
)


def is_shown(metric: Metric) -> bool:
    """Return whether a gateway in front of foreign engines can have data for a metric."""
    is_ours = metric.name.startswith(("oaiserve_", "gen_ai_"))  # The rest have vLLM's names, which its own page uses.
    return is_ours and metric not in _OF_OUR_ENGINE


class ObservedEngines(RequestSeries):
    """The series of requests to several engines."""

    _engine = ""  # number of the engine of the record that is being added

    def labels_of(self, metric: Metric) -> tuple[str, ...]:
        labels = super().labels_of(metric)
        return (*labels, ENGINE) if _OPERATION in labels else labels

    def shown(self, metric: Metric, series: Metric) -> Metric:
        if _OPERATION in series.labels and ENGINE not in metric.labels:
            return replace(metric, labels=(*metric.labels, ENGINE))
        return metric

    def count(self, metric: Metric, labels: LabelValues, amount: int = 1) -> None:
        super().count(metric, self._with_engine(metric, labels), amount)

    def add(self, metric: Metric, labels: LabelValues, value: Number, origin: Origin | None = None) -> None:
        super().add(metric, self._with_engine(metric, labels), value, origin)

    def add_all(self, metric: Metric, labels: LabelValues, values: array[int], origin: Origin | None) -> None:
        super().add_all(metric, self._with_engine(metric, labels), values, origin)

    def observe(self, record: RequestRecord) -> None:
        self._engine = str(record.routing.get(ENGINE, ""))
        super().observe(record)

    def begin_at_zero(self) -> None:
        """Do nothing, because the engines' models are not known yet."""

    def _with_engine(self, metric: Metric, labels: LabelValues) -> LabelValues:
        return (*labels, self._engine) if _OPERATION in metric.labels else labels


def readers(engines: Sequence[ForeignEngine]) -> Mapping[Metric, Callable[[], Mapping[LabelValues, Number]]]:
    """Return the functions that read the engines' own metrics for a page."""

    def info() -> dict[LabelValues, Number]:
        identities = {engine.name: engine.identity for engine in engines}
        return {(name, who.kind, who.version, (*who.models, "")[0]): 1 for name, who in identities.items()}

    def reported(*fields: str) -> dict[LabelValues, Number]:
        samples = [(engine.name, sample) for engine in engines if (sample := engine.reported.last) is not None]
        found = {(name, field): getattr(sample, field) for name, sample in samples for field in fields}
        return {labels: number for labels, number in found.items() if number is not None}

    def num_open() -> dict[LabelValues, Number]:
        found: Counter[LabelValues] = Counter(dict.fromkeys(((engine.name, "") for engine in engines), 0))
        for engine in engines:
            found.update((engine.name, presence.name or "") for presence in [*engine.presences.open])
        return dict(found)

    return {
        INFO: info,
        UP: lambda: {(engine.name,): int(engine.is_up) for engine in engines},
        OPEN: num_open,
        UNREAD: lambda: {(engine.name,): engine.num_unread for engine in engines},
        REPORTED: lambda: reported("running", "waiting"),
        PREEMPTIONS: lambda: {labels[:1]: number for labels, number in reported("preemptions").items()},
        CACHE_TOKENS: lambda: {
            (name, field.removesuffix("_tokens")): number
            for (name, field), number in reported("queried_tokens", "hit_tokens").items()
        },
    }
