"""`RequestSeries` holds the series of ended requests and of steps, and adds each record to them.

Every label has few values: an unknown value from a client becomes "other". This module is not thread-safe.
"""

from __future__ import annotations

import re
from array import array

from oaiserve.errors import (
    AdapterUnloaded,
    APIError,
    BodyTooLarge,
    ContextLengthExceeded,
    DeadlineMissed,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    RateLimited,
    RequestTimeout,
    StoreFailed,
    ThreadUnsupported,
    TimeLimitExceeded,
    Unavailable,
    UnsupportedMedia,
    kinds_of,
)
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import (
    FURTHER_CLIENTS,
    POOLING_OPERATIONS,
    AccessRefusal,
    Cause,
    DeadlineOutcome,
    Outcome,
    ReadAgain,
    RequestRecord,
    ToolCallOutcome,
    WaitReason,
)
from oaiserve.facts.step_record import StepRecord
from oaiserve.facts.times import EpochOffset
from oaiserve.telemetry import names, vllm_names
from oaiserve.telemetry.series import NS_PER_SECOND, Counter, Distribution, LabelValues, Number, Origin
from oaiserve.telemetry.targets import LEAST_NS, Targets

OPERATIONS = frozenset({"chat", "messages", "responses", "text_completion"}) | POOLING_OPERATIONS
FINISH_REASONS = frozenset({"stop", "length", "repetition"})
ABORT = "abort"
OTHER = FURTHER_CLIENTS  # stands for everything that has no series of its own
LOCAL_COMPUTE = "local_compute"  # vLLM's words for the sources of prompt tokens
LOCAL_CACHE_HIT = "local_cache_hit"
MOST_NAMES = 512  # the most adapters, and the most clients, that have series of their own
EXPLAINED = ("prefill", "decode")  # the phases that have causes
PER_RATIO = 1_000_000  # ratios are counted in millionths, as integers
PER_FINE_UNIT = 10**9  # joules and prices are counted in billionths, because a token may cost a tiny part of a unit
# Outcome, status and error class of the requests that the service level objectives count, for any operation.
_IN_OBJECTIVES = (
    (Outcome.FINISHED, "200", ""),
    (Outcome.FAILED, "200", InternalError.__name__),  # error within a stream
    (Outcome.FAILED, "200", Unavailable.__name__),  # in a stream; in all streams at once if a GPU runs out of memory
    (Outcome.FAILED, "500", InternalError.__name__),
    (Outcome.REJECTED, "429", Overloaded.__name__),
    (Outcome.REJECTED, "503", Unavailable.__name__),
)
# The same for answers that could not be stored. Only one operation stores answers.
_OF_STORE = (
    (Outcome.FAILED, "200", StoreFailed.__name__),
    (Outcome.REJECTED, "503", StoreFailed.__name__),
)
# The errors with which requests to the engine may be rejected.
_REFUSALS = (
    *(AdapterUnloaded, BodyTooLarge, ContextLengthExceeded, DeadlineMissed, Forbidden, InvalidRequest, ModelNotFound),
    *(NotFound, Overloaded, RateLimited, RequestTimeout, StoreFailed, ThreadUnsupported, TimeLimitExceeded),
    *(Unavailable, UnsupportedMedia),
)
# Labels that a metric doesn't show itself, but that another metric of the same series shows.
_MORE_LABELS: dict[Metric, tuple[str, ...]] = {names.DURATION_SECONDS: ("error_type",)}
# Prometheus stores exemplar times in milliseconds, and warns of a second exemplar with the same bucket and time. Two
# milliseconds are enough even if times are rounded down.
EXEMPLAR_SPACING_NS = 2_000_000


class RequestSeries:
    """All series, keyed by metric, except for numbers that other components maintain. The series of `model`, the served
    name, exist from the start, and those of an adapter once it is used."""

    def __init__(self, model: str, epoch_offset_ns: EpochOffset, targets: Targets | None = None) -> None:
        self._model = model
        self._targets = targets or Targets()
        self._adapters: set[str] = set()
        self._clients: set[str] = set()
        self._epoch_offset_ns = epoch_offset_ns
        self._exemplars_ns = -EXEMPLAR_SPACING_NS  # end of the last request that left exemplars
        self._error_types = frozenset(kinds_of(APIError))

        own = (*names.METRICS, *names.FOR_VLLM)
        every = (*own, *names.GEN_AI_METRICS, *vllm_names.METRICS)
        self.counters = {
            metric: Counter(*self.labels_of(metric), per_unit=_per_unit(metric))
            for metric in own
            if metric.type == "counter"
        }
        self.distributions = {
            metric: Distribution(
                *self.labels_of(metric),
                shown_as=[shown for shown in every if metric in (shown, shown.of)],
                per_unit=_per_unit(metric),
            )
            for metric in own
            if metric.type in ("histogram", "summary")
        }

        self.begin_at_zero()

    def begin_at_zero(self) -> None:
        """Create series with the value 0, so that PromQL's `rate` sees their first increment."""
        model = self._model
        for operation in sorted(OPERATIONS):
            self.count(names.PROMPT_TOKENS, (operation, model), 0)
            for end, status, error_type in _IN_OBJECTIVES + (_OF_STORE if operation == "responses" else ()):
                self.count(names.REQUESTS, (end, operation, model, status, error_type), 0)
        for kind in _REFUSALS:
            self.count(names.REJECTED, (_snake_case(kind.__name__),), 0)
        for source in (LOCAL_COMPUTE, LOCAL_CACHE_HIT):
            self.count(names.PROMPT_SOURCES, (source, model), 0)
        for operation in sorted(OPERATIONS - POOLING_OPERATIONS):
            for metric in (names.CACHED_PROMPT_TOKENS, names.GENERATION_TOKENS, names.LOOPS):
                self.count(metric, (operation, model), 0)
            for reason in (*sorted(FINISH_REASONS), ABORT):
                self.count(names.FINISHED_CHOICES, (operation, model, reason), 0)
        for metric, label_values in (
            (names.DEADLINES, DeadlineOutcome),
            (names.TOOL_CALLS, ToolCallOutcome),
            (names.QUEUE_WAIT_SECONDS, WaitReason),
            (names.READ_AGAIN_TOKENS, ReadAgain),
            (names.READ_AGAIN_SECONDS, ReadAgain),
            (names.REFUSED_ACCESS, AccessRefusal),
        ):
            for value in label_values:
                self.count(metric, (value,), 0)
        for slo in LEAST_NS:
            for outcome in ("met", "missed"):
                self.count(names.SLO_REQUESTS, (slo, model, outcome), 0)
        for phase in EXPLAINED:
            for cause in Cause:
                if cause not in (Cause.MODEL_LOAD, Cause.INSIDE_ENGINE, Cause.REFUSAL_DELAY):
                    self.count(names.PHASE_CAUSE_SECONDS, (phase, cause), 0)

    def labels_of(self, metric: Metric) -> tuple[str, ...]:
        """Return the labels of a metric's series."""
        return (*metric.labels, *_MORE_LABELS.get(metric, ()))

    def shown(self, metric: Metric, series: Metric) -> Metric:
        """Return the metric that the page shows for this series."""
        return metric

    def count(self, metric: Metric, labels: LabelValues, amount: int = 1) -> None:
        """Add an amount to a counter, in nanoseconds if its unit is seconds."""
        self.counters[metric].add(labels, amount)

    def add(self, metric: Metric, labels: LabelValues, value: Number, origin: Origin | None = None) -> None:
        """Add a value to a histogram, in nanoseconds if its unit is seconds."""
        self.distributions[metric].add(labels, value, origin)

    def add_all(self, metric: Metric, labels: LabelValues, values: array[int], origin: Origin | None) -> None:
        """Add many values to a histogram, in nanoseconds if its unit is seconds."""
        self.distributions[metric].add_all(labels, values, origin)

    def observe(self, record: RequestRecord) -> None:
        """Add one ended request to all series. Sums of times grow by exactly the nanoseconds of the record."""
        times = record.times
        account = record.account
        phases = times.phases()
        operation = _known(record.operation, OPERATIONS)
        if record.error_type:
            error_type = _known(record.error_type, self._error_types)
        else:
            error_type = ""
        if record.adapter is None:
            model = self._model
        else:
            model = _bounded(self._adapters, record.adapter)
        labels = (record.outcome, operation, model)
        origin = self._origin(record, phases[-1].end_ns)

        if not record.background:
            for phase in phases:
                self.add(names.PHASE_SECONDS, (phase.name, *labels), phase.duration_ns, origin)
            self.add(names.DURATION_SECONDS, (*labels, error_type), times.duration_ns, origin)
            if times.scheduled is not None and times.last_token is not None:
                self.add(names.INFERENCE_SECONDS, labels, times.last_token - times.scheduled, origin)
            if account.num_preemptions:
                self.add(names.PREEMPTION_STALL_SECONDS, (operation, model), account.stalled_ns, origin)
            for wait, wait_ns in account.waits_ns.items():
                self.count(names.QUEUE_WAIT_SECONDS, (wait,), wait_ns)
            for phase_name, causes_ns in record.causes_ns.items():
                for cause, cause_ns in causes_ns.items():
                    self.count(names.PHASE_CAUSE_SECONDS, (phase_name, cause), cause_ns)
        if account.grammar_compile_ns is not None:
            self.add(
                names.GRAMMAR_COMPILE_SECONDS, (account.grammar_cache or OTHER,), account.grammar_compile_ns, origin
            )
        if record.prompt_tokens:
            self.add(names.REQUEST_PROMPT_TOKENS, labels, record.prompt_tokens, origin)
            self.add(names.COMPUTED_TOKENS, labels, record.prompt_tokens - record.cached_tokens, origin)

        self.count(names.PROMPT_TOKENS, (operation, model), record.prompt_tokens)
        self.count(names.PROMPT_SOURCES, (LOCAL_COMPUTE, model), record.prompt_tokens - record.cached_tokens)
        self.count(names.PROMPT_SOURCES, (LOCAL_CACHE_HIT, model), record.cached_tokens)
        status = record.http_status
        if status is None:
            code = ""
        elif 100 <= status <= 599:
            code = str(status)
        else:
            code = OTHER
        self.count(names.REQUESTS, (*labels, code, error_type))
        group = f"{code[0]}xx" if code[:1].isdigit() else "none"
        self.count(names.HTTP_REQUESTS, (record.http_route, record.http_method, group))
        if record.outcome is Outcome.REJECTED:
            self.count(names.REJECTED, (_snake_case(error_type or OTHER),))
        if record.deadline is not None:
            self.count(names.DEADLINES, (record.deadline,))
        for judged in self._targets.judge(record):
            for outcome, is_so in (("met", judged.is_met), ("missed", not judged.is_met)):
                self.count(names.SLO_REQUESTS, (judged.slo, model, outcome), int(is_so))
        self._observe_costs(record)
        self._observe_clients(record)
        if operation not in POOLING_OPERATIONS:
            self._observe_generation(record, labels, origin)

    def _observe_generation(self, record: RequestRecord, labels: tuple[str, str, str], origin: Origin | None) -> None:
        account = record.account
        _, operation, model = labels
        if not record.background:
            self._observe_tokens(record, labels, origin)
        if record.prompt_tokens:
            self.add(names.REQUEST_GENERATION_TOKENS, labels, record.generated_tokens, origin)
            self.add(names.REQUEST_LONGEST_CHOICE_TOKENS, labels, account.longest_choice_tokens, origin)
            self.add(names.REQUEST_CHOICES, labels, int(record.params.get("n", 1)), origin)
            if "max_tokens" in record.params:
                self.add(names.REQUEST_MAX_TOKENS, labels, int(record.params["max_tokens"]), origin)
        self.count(names.CACHED_PROMPT_TOKENS, (operation, model), record.cached_tokens)
        if record.read_again_reason is not None:
            self.count(names.READ_AGAIN_TOKENS, (record.read_again_reason,), record.read_again_tokens)
            if not record.background:
                self.count(names.READ_AGAIN_SECONDS, (record.read_again_reason,), record.read_again_ns)
        self.count(names.GENERATION_TOKENS, (operation, model), record.generated_tokens)
        for reason in record.finish_reasons:
            self.count(names.FINISHED_CHOICES, (operation, model, _known(reason, FINISH_REASONS)))
        self.count(names.LOOPS, (operation, model), account.num_loops)
        for outcome, number in record.tool_calls.items():
            self.count(names.TOOL_CALLS, (outcome,), number)
        if record.outcome in (Outcome.CANCELLED, Outcome.FAILED):
            num_aborted = account.num_choices - len(record.finish_reasons)
            self.count(names.FINISHED_CHOICES, (operation, model, ABORT), max(0, num_aborted))

    def _observe_tokens(self, record: RequestRecord, labels: tuple[str, str, str], origin: Origin | None) -> None:
        times = record.times
        if (ttft_ns := times.time_to_first_token_ns) is not None:
            self.add(names.TIME_TO_FIRST_TOKEN_SECONDS, labels, ttft_ns, origin)
        tpot_ns = times.time_per_output_token_ns(record.tokens_per_choice)
        if tpot_ns is not None and record.tokens_per_choice > 1:
            self.add(names.TIME_PER_OUTPUT_TOKEN_SECONDS, labels, tpot_ns, origin)
        self.add_all(names.INTER_TOKEN_LATENCY_SECONDS, labels, record.event_gaps_ns, origin)
        self.add_all(names.EVENT_TOKENS, labels, record.event_tokens, origin)
        step_gaps_ns = array("q", filter(None, record.account.inter_token_ns))
        self.add_all(names.STEP_GAP_SECONDS, labels, step_gaps_ns, origin)

    def _observe_costs(self, record: RequestRecord) -> None:
        account = record.account
        labels = (_bounded(self._clients, record.client or ""),)
        for metric, amount in (
            (names.COST_CORE_SECONDS, account.core_ns),
            (names.COST_MACHINE_SECONDS, account.machine_ns),
            (names.COST_ALONE_SECONDS, account.alone_ns),
            (names.COST_WEIGHT_BYTES, account.weight_bytes),
            (names.COST_KV_BYTE_SECONDS, account.kv_byte_seconds),
            (names.COST_JOULES, account.joules),
            (names.COST_PRICE, account.price),
        ):
            if amount is not None:
                self.count(metric, labels, amount if isinstance(amount, int) else round(amount * _per_unit(metric)))

    def _observe_clients(self, record: RequestRecord) -> None:
        """Count how long the request's client waited for other clients, and how long each of these delayed it."""
        if record.background or not record.account.knows_others:
            return
        clients_ns = record.account.client_waited_ns
        own = _bounded(self._clients, record.client or "")
        self.count(names.CLIENT_WAITED_SECONDS, (own,), sum(clients_ns.values()))
        self.count(names.CLIENT_DELAYED_SECONDS, (own,), 0)
        for name, ns in clients_ns.items():
            self.count(names.CLIENT_DELAYED_SECONDS, (_bounded(self._clients, name),), ns)

    def _origin(self, record: RequestRecord, ended_ns: int) -> Origin | None:
        """Return the origin for the record's exemplars, or None if another record has left exemplars within
        EXEMPLAR_SPACING_NS."""
        if ended_ns - self._exemplars_ns < EXEMPLAR_SPACING_NS:
            return None
        self._exemplars_ns = ended_ns
        return Origin(record.trace.trace_id, record.trace.span_id, ended_ns + self._epoch_offset_ns())

    def observe_step(self, step: StepRecord) -> None:
        self.add(names.ENGINE_STEP_SECONDS, (step.kind,), step.duration_ns)
        self.add(names.ENGINE_STEP_SEQUENCES, (), step.num_sequences)
        self.add(names.ENGINE_STEP_TOKENS, (), step.num_tokens)
        if step.cost_error is not None:
            self.add(names.STEP_COST_ERROR, (step.kind,), round(step.cost_error * PER_RATIO))


def _per_unit(metric: Metric) -> int:
    """Return how many counted integers make one unit of the metric."""
    fine = {"joules": PER_FINE_UNIT, "price": PER_FINE_UNIT}
    return {"seconds": NS_PER_SECOND, "ratio": PER_RATIO, **fine}.get(metric.unit, 1)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _bounded(known: set[str], name: str) -> str:
    """Return the name, or "other" above the limit: adapters and clients come and go, so not all of them can have
    series."""
    if name not in known:
        if len(known) >= MOST_NAMES:
            return OTHER
        known.add(name)
    return name


def _known(value: str, known: frozenset[str]) -> str:
    if value in known:
        return value
    return OTHER
