"""Everything on /metrics: what records and steps tell, the engine's numbers of the moment, and our own account.

One lock guards the series. The telemetry thread takes it once per record; a page is made under it, so that all numbers
on it are of one moment. Neither the event loop nor the engine thread ever takes it: what they tell waits in a queue.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from oaiserve.record import Outcome, RequestRecord, StepRecord
from oaiserve.telemetry import names
from oaiserve.telemetry.live import Live
from oaiserve.telemetry.observations import Observations
from oaiserve.telemetry.page import Form, Page, negotiate
from oaiserve.telemetry.series import (
    NS_PER_SECOND,
    Counter,
    CounterFamily,
    Distribution,
    Family,
    HistogramFamily,
    LabelValues,
    Points,
    Reading,
)
from oaiserve.telemetry.snapshot import Snapshot, engine_families
from oaiserve.telemetry.vllm import vllm_families
from oaiserve.times import monotonic_ns


class Metrics:
    """`observe` and `take_in` are called by the telemetry thread, the other methods by any.

    `take_steps` gives the steps since the last call. `model_info` has values for the labels of oaiserve_model_info, as
    far as they are known. `vllm`: show vLLM's names, too.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        take_steps: Callable[[], list[StepRecord]],
        model: str,
        version: str,
        model_info: Mapping[str, str],
        vllm: bool,
        epoch_offset_ns: int,
    ) -> None:
        self._snapshot = snapshot
        self._take_steps = take_steps
        self._now: Snapshot | None = None  # for the page that is being made
        self._observed = Observations(model, epoch_offset_ns)
        self.live = Live(self._observed, epoch_offset_ns)
        self._lag = Distribution(shown_as=(names.EVENT_LOOP_LAG_SECONDS,), per_unit=NS_PER_SECOND)
        self._scrape = Distribution(shown_as=(names.SCRAPE_DURATION_SECONDS,), per_unit=NS_PER_SECOND)
        self._errors = Counter("consumer")
        self._spans = Counter("result")
        self._families: list[Family] = [
            *_request_families(self._observed),
            *engine_families(self._present),
            HistogramFamily(names.ENGINE_STEP_SECONDS, self._observed.step),
            HistogramFamily(names.ENGINE_STEP_SEQUENCES, self._observed.step_sequences),
            HistogramFamily(names.ENGINE_STEP_TOKENS, self._observed.step_tokens),
            HistogramFamily(names.EVENT_LOOP_LAG_SECONDS, self._lag),
            _info(names.BUILD_INFO, {"version": version, "python": platform.python_version(), "model": model}),
            _info(names.MODEL_INFO, {**model_info, "model": model}),
            HistogramFamily(names.SCRAPE_DURATION_SECONDS, self._scrape),
            CounterFamily(names.TELEMETRY_ERRORS, self._errors),
            CounterFamily(names.SPANS, self._spans),
            *_gen_ai_families(self._observed),
        ]
        block_size = model_info.get("block_size", "")
        aliases = vllm_families(self._observed, self._present, model=model, block_size=block_size) if vllm else []
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._page = Page([*self._families, *aliases], registry)
        self._lock = Lock()
        self._num_pages = 0  # that were begun
        self._pages: dict[Form, tuple[int, bytes]] = {}  # the last one in each form, and its number
        # By threads that must not wait, such as the event loop: what to add to which series.
        self._told: deque[tuple[Counter | Distribution, LabelValues, int]] = deque()

    def observe(self, record: RequestRecord) -> None:
        """The engine's steps up to its end are taken in first."""
        with self._lock:
            self._take_in()
            self._observed.observe(record)

    def take_in(self) -> None:
        """Takes in the engine's last steps, and what other threads told. Once a second, notes what has come since."""
        with self._lock:
            self._take_in()
            self.live.sample(self._snapshot)

    def observe_event_loop_lag(self, seconds: float) -> None:
        self._told.append((self._lag, (), round(seconds * NS_PER_SECOND)))

    def count_error(self, consumer: str) -> None:
        """A record that `consumer` failed on."""
        self._told.append((self._errors, (consumer,), 1))

    def count_spans(self, result: str, number: int) -> None:
        """`result`: "ended", "exported", "failed" or "dropped"."""
        self._told.append((self._spans, (result,), number))

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The page for /metrics and its content type: OpenMetrics (with exemplars) for those who ask for it in their
        Accept header, else the classic text format. It has all that was observed before the call. May take
        milliseconds: call it in a worker thread. Callers that come while a page is made share the next one."""
        form = negotiate(accept)
        num_before = self._num_pages
        with self._lock:
            number, page = self._pages.get(form, (0, b""))
            if number <= num_before:  # it was begun before this call
                started_ns = monotonic_ns()
                self._num_pages += 1
                with self._fresh():
                    page = self._page.render(form)
                self._pages[form] = (self._num_pages, page)
                self._scrape.add((), monotonic_ns() - started_ns)
        return page, str(form)

    def collect(self) -> list[tuple[names.Metric, Points]]:
        """The same numbers as data, without vLLM's names and those of the client library."""
        with self._lock, self._fresh():
            return [(family.metric, family.points()) for family in self._families]

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        """Within it, families show what is so far."""
        self._take_in()
        self._now = self._snapshot()
        try:
            yield
        finally:
            self._now = None

    def _present(self) -> Snapshot:
        assert self._now is not None, "families are only read within _fresh"
        return self._now

    def _take_in(self) -> None:
        for step in self._take_steps():
            self._observed.observe_step(step)
        while self._told:
            series, labels, amount = self._told.popleft()
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
        CounterFamily(names.REQUESTS, observed.requests),
        CounterFamily(names.REJECTED, observed.rejected),
        CounterFamily(names.FINISHED_CHOICES, observed.choices),
        CounterFamily(names.PROMPT_TOKENS, observed.prompt_tokens),
        CounterFamily(names.CACHED_PROMPT_TOKENS, observed.cached_tokens),
        CounterFamily(names.GENERATION_TOKENS, observed.generation_tokens),
        CounterFamily(names.QUEUE_WAIT_SECONDS, observed.queue_wait),
    ]


def _gen_ai_families(observed: Observations) -> list[Family]:
    """OpenTelemetry's conventions: an error type on the duration; the other two for answers that succeeded."""
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


def _info(metric: names.Metric, values: Mapping[str, str]) -> Reading:
    """Values of labels that are not given are empty."""
    labels = tuple(values.get(label, "") for label in metric.labels)
    return Reading(metric, lambda: {labels: 1})
