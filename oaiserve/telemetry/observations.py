"""`Observations` owns the series of ended requests and of steps, and adds each record to them.

Every label has few values, whatever clients send: an unknown value becomes "other". This module is not thread-safe.
"""

from __future__ import annotations

import re

from oaiserve.errors import APIError
from oaiserve.facts.record import (
    POOLING_OPERATIONS,
    Cause,
    Outcome,
    RequestRecord,
    StepRecord,
    ToolCallOutcome,
    WaitReason,
)
from oaiserve.telemetry import names, vllm_names
from oaiserve.telemetry.series import NS_PER_SECOND, Counter, Distribution, Origin

OPERATIONS = frozenset({"chat", "responses", "text_completion"}) | POOLING_OPERATIONS
FINISH_REASONS = frozenset({"stop", "length"})
ABORT = "abort"
OTHER = "other"
MOST_ADAPTERS = 512  # that have series of their own
EXPLAINED = ("prefill", "decode")  # the phases that have causes
PER_RATIO = 1_000_000  # ratios are counted in millionths, as integers


# Prometheus keeps exemplar times in milliseconds, and warns of a second exemplar that has the same bucket and time.
# The second millisecond is for times that are rounded down.
EXEMPLAR_SPACING_NS = 2_000_000


class Observations:
    """The series of requests and steps.

    `model` is the served name, which has series from the start; adapters have series when they were asked.
    `epoch_offset_ns` is wall clock minus monotonic clock.
    """

    def __init__(self, model: str, epoch_offset_ns: int) -> None:
        self._model = model
        self._adapters: set[str] = set()
        self._epoch_offset_ns = epoch_offset_ns
        self._exemplars_unix_ns = -EXEMPLAR_SPACING_NS  # when the last request that left exemplars ended
        self._error_types = _class_names(APIError)

        request = ("outcome", "operation", "model")
        self.phase = _seconds(
            *("phase", *request),
            shown_as=(names.PHASE_SECONDS, vllm_names.QUEUE, vllm_names.PREFILL, vllm_names.DECODE),
        )
        self.duration = _seconds(
            *(*request, "error_type"),
            shown_as=(names.DURATION_SECONDS, names.GEN_AI_REQUEST_DURATION, vllm_names.DURATION),
        )
        self.time_to_first_token = _seconds(
            *request,
            shown_as=(
                names.TIME_TO_FIRST_TOKEN_SECONDS,
                names.GEN_AI_TIME_TO_FIRST_TOKEN,
                vllm_names.TIME_TO_FIRST_TOKEN,
            ),
        )
        self.time_per_output_token = _seconds(
            *request,
            shown_as=(
                names.TIME_PER_OUTPUT_TOKEN_SECONDS,
                names.GEN_AI_TIME_PER_OUTPUT_TOKEN,
                vllm_names.TIME_PER_OUTPUT_TOKEN,
            ),
        )
        self.inter_token_latency = _seconds(
            *request, shown_as=(names.INTER_TOKEN_LATENCY_SECONDS, vllm_names.INTER_TOKEN_LATENCY)
        )
        self.inference = _seconds(*request, shown_as=(vllm_names.INFERENCE,))
        self.stall = _seconds("operation", "model", shown_as=(names.PREEMPTION_STALL_SECONDS,))
        self.request_prompt_tokens = Distribution(
            *request, shown_as=(names.REQUEST_PROMPT_TOKENS, vllm_names.REQUEST_PROMPT_TOKENS)
        )
        self.request_generation_tokens = Distribution(
            *request, shown_as=(names.REQUEST_GENERATION_TOKENS, vllm_names.REQUEST_GENERATION_TOKENS)
        )
        self.request_longest_choice_tokens = Distribution(
            *request, shown_as=(names.REQUEST_LONGEST_CHOICE_TOKENS, vllm_names.REQUEST_LONGEST_CHOICE_TOKENS)
        )
        self.request_choices = Distribution(*request, shown_as=(names.REQUEST_CHOICES, vllm_names.REQUEST_CHOICES))
        self.request_max_tokens = Distribution(
            *request, shown_as=(names.REQUEST_MAX_TOKENS, vllm_names.REQUEST_MAX_TOKENS)
        )
        self.requests = Counter(*request, "status", "error_type")
        self.rejected = Counter("reason")
        self.choices = Counter("operation", "model", "reason")
        self.tool_calls = Counter("outcome")
        self.prompt_tokens = Counter("operation", "model")
        self.cached_tokens = Counter("operation", "model")
        self.generation_tokens = Counter("operation", "model")
        self.queue_wait = Counter("reason", per_unit=NS_PER_SECOND)
        self.phase_cause = Counter("phase", "cause", per_unit=NS_PER_SECOND)
        self.grammar_compile = _seconds("cache", shown_as=(names.GRAMMAR_COMPILE_SECONDS,))
        self.step = _seconds("kind", shown_as=(names.ENGINE_STEP_SECONDS,))
        self.step_sequences = Distribution(shown_as=(names.ENGINE_STEP_SEQUENCES,))
        self.step_cost_error = Distribution("kind", shown_as=(names.STEP_COST_ERROR,), per_unit=PER_RATIO)
        self.step_tokens = Distribution(shown_as=(names.ENGINE_STEP_TOKENS, vllm_names.STEP_TOKENS))

        # These start at 0 so that PromQL's `rate` sees their first increment.
        for operation in sorted(OPERATIONS):
            self.prompt_tokens.add((operation, model), 0)
        for operation in sorted(OPERATIONS - POOLING_OPERATIONS):
            for counter in (self.cached_tokens, self.generation_tokens):
                counter.add((operation, model), 0)
            for reason in (*sorted(FINISH_REASONS), ABORT):
                self.choices.add((operation, model, reason), 0)
        for outcome in ToolCallOutcome:
            self.tool_calls.add((outcome,), 0)
        for wait in WaitReason:
            self.queue_wait.add((wait,), 0)
        for phase in EXPLAINED:
            for cause in Cause:
                self.phase_cause.add((phase, cause), 0)

    def observe(self, record: RequestRecord) -> None:
        """Add one ended request to all series. Sums of times grow by exactly the nanoseconds of the record."""
        times, account = record.times, record.account
        phases = times.phases()
        operation = _known(record.operation, OPERATIONS)
        error_type = _known(record.error_type, self._error_types) if record.error_type else ""
        model = self._model if record.adapter is None else self._known_adapter(record.adapter)
        labels = (record.outcome, operation, model)
        origin = self._origin(record, phases[-1].end_ns + self._epoch_offset_ns)

        for phase in phases:
            self.phase.add((phase.name, *labels), phase.duration_ns, origin)
        self.duration.add((*labels, error_type), times.duration_ns, origin)
        if times.scheduled is not None and times.last_token is not None:
            self.inference.add(labels, times.last_token - times.scheduled, origin)
        if account.num_preemptions:
            self.stall.add((operation, model), account.stalled_ns, origin)
        if account.grammar_compile_ns is not None:
            self.grammar_compile.add((account.grammar_cache,), account.grammar_compile_ns, origin)
        if record.prompt_tokens:
            self.request_prompt_tokens.add(labels, record.prompt_tokens, origin)

        self.prompt_tokens.add((operation, model), record.prompt_tokens)
        self.requests.add((*labels, _status(record.http_status), error_type))
        if record.outcome is Outcome.REJECTED:
            self.rejected.add((_snake_case(error_type or OTHER),))
        for wait, wait_ns in account.waits_ns.items():
            self.queue_wait.add((wait,), wait_ns)
        for phase_name, causes_ns in record.causes_ns.items():
            for cause, cause_ns in causes_ns.items():
                self.phase_cause.add((phase_name, cause), cause_ns)
        if operation not in POOLING_OPERATIONS:
            self._observe_generation(record, labels, origin)

    def _observe_generation(self, record: RequestRecord, labels: tuple[str, str, str], origin: Origin | None) -> None:
        """Add what only requests have that generate text: tokens, and the choices that these make."""
        times, account, (_, operation, model) = record.times, record.account, labels
        ttft_ns = times.time_to_first_token_ns
        if ttft_ns is not None:
            self.time_to_first_token.add(labels, ttft_ns, origin)
        tpot_ns = times.time_per_output_token_ns(record.tokens_per_choice)
        if tpot_ns is not None and record.tokens_per_choice > 1:
            self.time_per_output_token.add(labels, tpot_ns, origin)
        self.inter_token_latency.add_all(labels, account.inter_token_ns, origin)
        if record.prompt_tokens:
            self.request_generation_tokens.add(labels, record.completion_tokens, origin)
            self.request_longest_choice_tokens.add(labels, account.longest_choice_tokens, origin)
            self.request_choices.add(labels, int(record.params.get("n", 1)), origin)
            if "max_tokens" in record.params:
                self.request_max_tokens.add(labels, int(record.params["max_tokens"]), origin)
        self.cached_tokens.add((operation, model), record.cached_tokens)
        self.generation_tokens.add((operation, model), record.completion_tokens)
        for reason in record.finish_reasons:
            self.choices.add((operation, model, _known(reason, FINISH_REASONS)))
        for outcome, number in record.tool_calls.items():
            self.tool_calls.add((outcome,), number)
        if record.outcome in (Outcome.CANCELLED, Outcome.FAILED):
            num_aborted = account.num_choices - len(record.finish_reasons)
            self.choices.add((operation, model, ABORT), max(0, num_aborted))

    def _known_adapter(self, name: str) -> str:
        """Return the name of an adapter. Adapters come and go, so not all of them can have series."""
        if name not in self._adapters:
            if len(self._adapters) >= MOST_ADAPTERS:
                return OTHER
            self._adapters.add(name)
        return name

    def _origin(self, record: RequestRecord, ended_unix_ns: int) -> Origin | None:
        """Return the origin of the record's exemplars, or None if another record has left exemplars a moment ago."""
        if ended_unix_ns - self._exemplars_unix_ns < EXEMPLAR_SPACING_NS:
            return None
        self._exemplars_unix_ns = ended_unix_ns
        return Origin(record.trace.trace_id, record.trace.span_id, ended_unix_ns)

    def observe_step(self, step: StepRecord) -> None:
        self.step.add((step.kind,), step.duration_ns)
        self.step_sequences.add((), step.num_sequences)
        self.step_tokens.add((), step.num_tokens)
        if step.cost_error is not None:
            self.step_cost_error.add((step.kind,), round(step.cost_error * PER_RATIO))


def _seconds(*labels: str, shown_as: tuple[names.Metric, ...]) -> Distribution:
    """Return a distribution of times, which are integers in nanoseconds and are shown in seconds."""
    return Distribution(*labels, shown_as=shown_as, per_unit=NS_PER_SECOND)


def _class_names(kind: type[APIError]) -> frozenset[str]:
    return frozenset({kind.__name__}).union(*map(_class_names, kind.__subclasses__()))


def _known(value: str, known: frozenset[str]) -> str:
    return value if value in known else OTHER


def _status(status: int | None) -> str:
    if status is None:
        return ""
    return str(status) if 100 <= status <= 599 else OTHER


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
