"""`Metrics` holds everything that /metrics shows: series of requests and steps, the engine's numbers, and its own cost.

One lock guards the series. The telemetry thread takes it once per record. A page is rendered under the lock, so that
all its numbers are of one moment. Neither the event loop nor the engine thread ever takes the lock: what they add waits
in a queue.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from oaiserve.facts.record import AccessRefusal, Outcome, RequestRecord, StepRecord
from oaiserve.facts.times import monotonic_ns
from oaiserve.telemetry import names
from oaiserve.telemetry.live import Live
from oaiserve.telemetry.observations import Observations
from oaiserve.telemetry.page import Form, Page, negotiate
from oaiserve.telemetry.series import (
    NS_PER_SECOND,
    CallbackFamily,
    Counter,
    CounterFamily,
    Distribution,
    Family,
    HistogramFamily,
    LabelValues,
    Points,
)
from oaiserve.telemetry.snapshot import (
    ConnectionCounts,
    FrontEndCounts,
    Snapshot,
    StoreCounts,
    connection_families,
    engine_families,
    front_end_families,
    store_families,
)
from oaiserve.telemetry.vllm import vllm_families


class Metrics:
    """All metrics of the server.

    Only the telemetry thread calls `observe` and `update`; any thread may call the other methods.

    `take_steps` returns the engine's steps since its last call. `model_info` has the known values for the labels of
    oaiserve_model_info, and `features` those of oaiserve_engine_feature. `vllm` adds vLLM's metric names to the page.
    `log_messages` returns the numbers of oaiserve_log_messages_total.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        take_steps: Callable[[], list[StepRecord]],
        connections: ConnectionCounts | None = None,
        front_ends: FrontEndCounts | None = None,
        stored_responses: Callable[[], StoreCounts] | None = None,
        model: str,
        version: str,
        model_info: Mapping[str, str],
        features: Mapping[str, bool] = MappingProxyType({}),
        vllm: bool,
        epoch_offset_ns: int,
        log_messages: Callable[[], Mapping[LabelValues, int]] = dict,
    ) -> None:
        self._snapshot = snapshot
        self._take_steps = take_steps
        self._snapshot_of_page: Snapshot | None = None  # set while a page is rendered
        self._observed = Observations(model, epoch_offset_ns)
        self.live = Live(self._observed, epoch_offset_ns)
        self._lag = Distribution(shown_as=(names.EVENT_LOOP_LAG_SECONDS,), per_unit=NS_PER_SECOND)
        self._scrape = Distribution(shown_as=(names.SCRAPE_DURATION_SECONDS,), per_unit=NS_PER_SECOND)
        self._errors = Counter("consumer")
        self._spans = Counter("result")
        self._refused_access = Counter("reason")
        for reason in AccessRefusal:
            self._refused_access.add((reason,), 0)
        self._families: list[Family] = [
            *_request_families(self._observed),
            *engine_families(self._page_snapshot),
            HistogramFamily(names.ENGINE_STEP_SECONDS, self._observed.step),
            HistogramFamily(names.ENGINE_STEP_SEQUENCES, self._observed.step_sequences),
            HistogramFamily(names.ENGINE_STEP_TOKENS, self._observed.step_tokens),
            CallbackFamily(names.ENGINE_FEATURE, lambda: {(name,): int(is_on) for name, is_on in features.items()}),
            HistogramFamily(names.STEP_COST_ERROR, self._observed.step_cost_error),
            *connection_families(connections),
            *front_end_families(front_ends),
            *store_families(stored_responses),
            HistogramFamily(names.EVENT_LOOP_LAG_SECONDS, self._lag),
            CounterFamily(names.REFUSED_ACCESS, self._refused_access),
            _info(names.BUILD_INFO, {"version": version, "python": platform.python_version(), "model": model}),
            _info(names.MODEL_INFO, {**model_info, "model": model}),
            HistogramFamily(names.SCRAPE_DURATION_SECONDS, self._scrape),
            CounterFamily(names.TELEMETRY_ERRORS, self._errors),
            CounterFamily(names.SPANS, self._spans),
            CallbackFamily(names.LOG_MESSAGES, log_messages),
            *_gen_ai_families(self._observed),
        ]
        block_size = model_info.get("block_size", "")
        aliases = vllm_families(self._observed, self._page_snapshot, model=model, block_size=block_size) if vllm else []
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._page = Page([*self._families, *aliases], registry)
        self._lock = Lock()
        self._num_pages = 0  # pages that were begun
        self._pages: dict[Form, tuple[int, bytes]] = {}  # the latest page in each format, and its number
        # Amounts from threads that must not wait for the lock, such as the event loop, and the series to add them to.
        self._pending: deque[tuple[Counter | Distribution, LabelValues, int]] = deque()

    def observe(self, record: RequestRecord) -> None:
        """Add an ended request to the series, after the engine's steps so far, among which are all of the request."""
        with self._lock:
            self._apply_pending()
            self._observed.observe(record)

    def update(self) -> None:
        """Add the engine's new steps and the pending amounts to the series, and make a live sample once a second."""
        with self._lock:
            self._apply_pending()
            self.live.sample(self._snapshot)

    def observe_event_loop_lag(self, seconds: float) -> None:
        self._pending.append((self._lag, (), round(seconds * NS_PER_SECOND)))

    def count_error(self, consumer: str) -> None:
        """Count a failure of telemetry; `consumer` is the label value of oaiserve_telemetry_errors_total."""
        self._pending.append((self._errors, (consumer,), 1))

    def count_spans(self, result: str, number: int) -> None:
        """Count spans by `result`, which is "ended", "exported", "failed" or "dropped"."""
        self._pending.append((self._spans, (result,), number))

    def count_refused_access(self, reason: AccessRefusal) -> None:
        self._pending.append((self._refused_access, (reason,), 1))

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Return the page for /metrics and its content type.

        The format is OpenMetrics, with exemplars, if the Accept header asks for it, else the classic text format. The
        page has everything that was observed before the call. Callers that arrive while a page is rendered share the
        next one. Call it in a worker thread, because it may take milliseconds.
        """
        form = negotiate(accept)
        num_before = self._num_pages
        with self._lock:
            number, page = self._pages.get(form, (0, b""))
            if number <= num_before:  # the kept page was begun before this call
                started_ns = monotonic_ns()
                self._num_pages += 1
                with self._reading():
                    page = self._page.render(form)
                self._pages[form] = (self._num_pages, page)
                self._scrape.add((), monotonic_ns() - started_ns)
        return page, str(form)

    def collect(self) -> list[tuple[names.Metric, Points]]:
        """Return the numbers of the page as data, without vLLM's names and those of the client library."""
        with self._lock, self._reading():
            return [(family.metric, family.points()) for family in self._families]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Bring the series up to date and hold a snapshot of the engine, while the families are read."""
        self._apply_pending()
        self._snapshot_of_page = self._snapshot()
        try:
            yield
        finally:
            self._snapshot_of_page = None

    def _page_snapshot(self) -> Snapshot:
        assert self._snapshot_of_page is not None, "families are only read within `_reading`"
        return self._snapshot_of_page

    def _apply_pending(self) -> None:
        for step in self._take_steps():
            self._observed.observe_step(step)
        while self._pending:
            series, labels, amount = self._pending.popleft()
            series.add(labels, amount)


def _request_families(observed: Observations) -> list[Family]:
    return [
        HistogramFamily(names.PHASE_SECONDS, observed.phase),
        HistogramFamily(names.DURATION_SECONDS, observed.duration),
        HistogramFamily(names.TIME_TO_FIRST_TOKEN_SECONDS, observed.time_to_first_token),
        HistogramFamily(names.TIME_PER_OUTPUT_TOKEN_SECONDS, observed.time_per_output_token),
        HistogramFamily(names.INTER_TOKEN_LATENCY_SECONDS, observed.inter_token_latency),
        HistogramFamily(names.PREEMPTION_STALL_SECONDS, observed.stall),
        HistogramFamily(names.REQUEST_PROMPT_TOKENS, observed.request_prompt_tokens),
        HistogramFamily(names.REQUEST_GENERATION_TOKENS, observed.request_generation_tokens),
        HistogramFamily(names.REQUEST_LONGEST_CHOICE_TOKENS, observed.request_longest_choice_tokens),
        HistogramFamily(names.REQUEST_CHOICES, observed.request_choices),
        HistogramFamily(names.REQUEST_MAX_TOKENS, observed.request_max_tokens),
        CounterFamily(names.REQUESTS, observed.requests),
        CounterFamily(names.REJECTED, observed.rejected),
        CounterFamily(names.FINISHED_CHOICES, observed.choices),
        CounterFamily(names.TOOL_CALLS, observed.tool_calls),
        CounterFamily(names.PROMPT_TOKENS, observed.prompt_tokens),
        CounterFamily(names.CACHED_PROMPT_TOKENS, observed.cached_tokens),
        CounterFamily(names.GENERATION_TOKENS, observed.generation_tokens),
        CounterFamily(names.QUEUE_WAIT_SECONDS, observed.queue_wait),
        CounterFamily(names.PHASE_CAUSE_SECONDS, observed.phase_cause),
        HistogramFamily(names.GRAMMAR_COMPILE_SECONDS, observed.grammar_compile),
    ]


def _gen_ai_families(observed: Observations) -> list[Family]:
    """Return the families of OpenTelemetry's conventions for GenAI servers.

    The duration has an error type. The two families for tokens count finished requests only.
    """
    renamed = {
        "gen_ai_operation_name": "operation",
        "gen_ai_request_model": "model",
        "gen_ai_response_model": "model",
    }
    constant = {"gen_ai_provider_name": names.SERVICE_NAME}
    where = {"outcome": str(Outcome.FINISHED)}
    return [
        HistogramFamily(names.GEN_AI_REQUEST_DURATION, observed.duration, renamed=renamed, constant=constant),
        HistogramFamily(
            names.GEN_AI_TIME_TO_FIRST_TOKEN,
            observed.time_to_first_token,
            where=where,
            renamed=renamed,
            constant=constant,
        ),
        HistogramFamily(
            names.GEN_AI_TIME_PER_OUTPUT_TOKEN,
            observed.time_per_output_token,
            where=where,
            renamed=renamed,
            constant=constant,
        ),
    ]


def _info(metric: names.Metric, values: Mapping[str, str]) -> CallbackFamily:
    """Return a family with one sample, whose labels carry the information; a label without a value is empty."""
    labels = tuple(values.get(label, "") for label in metric.labels)
    return CallbackFamily(metric, lambda: {labels: 1})
