"""Every number on /metrics equals a plain recomputation from the records, in both formats."""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Lock, Semaphore, Thread
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oaiserve.engine.types.adapters import MOST_ADAPTERS
from oaiserve.errors import APIError, InternalError, Overloaded, StoreFailed, Unavailable, kinds_of
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.metric import Metric
from oaiserve.facts.metric import metric as metric_named
from oaiserve.facts.record import EngineAccount, OthersTime, Outcome, ReadAgain, RequestRecord, WaitReason, Whose
from oaiserve.facts.step_record import StepKind, StepRecord
from oaiserve.telemetry import names, request_series, vllm_names
from oaiserve.telemetry.metrics import Metrics
from oaiserve.telemetry.page import Form
from tests.telemetry.pages import (
    FORMS,
    OPENMETRICS,
    TEXT,
    Key,
    families,
    key,
    metrics_of,
    samples,
)
from tests.telemetry.records import expected, records
from tests.telemetry.reported import PROCESS_METRICS

LABELS = {"outcome": "finished", "operation": "chat", "model": "demo"}
VLLM = {"model_name": "demo", "engine": "0"}
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
ALL = (*names.METRICS, *names.GEN_AI_METRICS, *vllm_names.METRICS)


@pytest.fixture
def metrics(snapshot: EngineNumbers) -> Metrics:
    return metrics_of(snapshot=lambda: snapshot)


def of_records(page: dict[Key, float]) -> dict[Key, float]:
    """Return the samples that are made of records, without counters that are 0."""
    others = "event_loop|engine|scrape|telemetry|spans|connections|log_messages|meter|refusal_delay|replica"
    gauges = {m.name for m in ALL if m.type in ("gauge", "info") or isinstance(m.of, str)}
    counters = {m.name for m in ALL if m.type == "counter"}
    return {
        (name, labels): value
        for (name, labels), value in page.items()
        if re.match(f"oaiserve_(?!{others})|gen_ai_|vllm:|http_", name)
        and name not in gauges
        and (value or name not in counters)
    }


def assert_same(found: dict[Key, float], wanted: dict[Key, float]) -> None:
    assert found.keys() == wanted.keys()
    for sample, value in wanted.items():
        # The sum of quotients may be rounded.
        is_mean = "time_per_output_token" in sample[0] and sample[0].endswith("_sum")
        assert math.isclose(found[sample], value, rel_tol=1e-12) if is_mean else found[sample] == value, sample


@given(turns=st.lists(st.tuples(records(), st.sets(st.sampled_from(FORMS))), max_size=5))
@settings(max_examples=15)
def test_each_page_matches_a_recomputation_from_the_records(turns: list[tuple[RequestRecord, set[str]]]) -> None:
    """Lines that are kept between pages are never stale."""
    metrics = metrics_of()
    ended = []
    for record, forms in turns:
        metrics.observe(record)
        ended.append(record)
        for form in forms:
            assert_same(of_records(samples(metrics, form)), expected(ended))
    for form in FORMS:
        assert_same(of_records(samples(metrics, form)), expected(ended))


def test_sums_stay_exact_where_floats_would_not(metrics: Metrics, make_record) -> None:
    """A float of 10**8 seconds cannot represent single nanoseconds that are added to it."""
    stalls_ns = [10**17, *[1] * 1000]
    for ns in stalls_ns:
        metrics.observe(make_record(account=EngineAccount(num_preemptions=1, stalled_ns=ns)))
    total = samples(metrics)[key(f"{names.PREEMPTION_STALL_SECONDS.name}_sum", operation="chat", model="demo")]
    assert total == sum(stalls_ns) / 10**9 != 10**8


def test_a_page_without_names_has_the_sums_of_all_clients(make_record) -> None:
    metrics = metrics_of()
    for client, ns in (("alice", 2 * 10**9), ("batchjob", 3 * 10**9), (None, 10**9)):
        others_ns = {"queue": [OthersTime(Whose.OTHER_CLIENT, "batchjob", ns, 0, 0)]}
        metrics.observe(make_record(client=client, account=EngineAccount(machine_ns=ns, others_ns=others_ns)))
    for form in FORMS:
        named, unnamed = (metrics.render(form, names_clients)[0].decode() for names_clients in (True, False))
        assert 'oaiserve_cost_machine_seconds_total{client="alice"} 2.0' in named
        assert 'oaiserve_cost_machine_seconds_total{client=""} 6.0' in unnamed
        assert 'oaiserve_client_delayed_seconds_total{client=""} 6.0' in unnamed
        assert ("alice" in unnamed, "batchjob" in unnamed) == (False, False)


# -- the engine -------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_current_numbers_of_the_engine(metrics: Metrics, snapshot: EngineNumbers) -> None:
    page = samples(metrics)
    for field, metric in names.ENGINE.items():
        number = getattr(snapshot, field)
        assert number, f"{field} is 0, so the test would not see whether it is on the page"
        assert page[key(metric.name)] == (number / 10**9 if field.endswith("_ns") else number)
    for metric in vllm_names.METRICS:
        if isinstance(metric.of, str):
            assert page[key(metric.name, **VLLM)] == getattr(snapshot, metric.of)
    snapshot.num_running = 5
    assert samples(metrics)[key(names.ENGINE["num_running"].name)] == 5


MODEL_INFO = dict.fromkeys(names.MODEL_INFO.labels, "") | {"model": "demo", "dtype": "bfloat16", "block_size": "16"}


@pytest.mark.parametrize(
    ("metric", "labels", "value"),
    [
        # gauges of the engine
        (names.KV_CACHE_USAGE, {}, 0.25),
        (names.KV_BLOCKS, {"state": "used"}, 30),
        (names.KV_BLOCKS, {"state": "cached"}, 25),
        (names.KV_BLOCKS, {"state": "free"}, 65),
        (names.DRAFT_TOKENS, {"outcome": "accepted"}, 70),
        (names.DRAFT_TOKENS, {"outcome": "rejected"}, 20),
        (names.ENGINE_HOST_SECONDS, {"part": "idle"}, 0),
        (names.ENGINE_HOST_SECONDS, {"part": "hand_over"}, 8.000000008),
        (names.ADAPTER_REQUESTS, {"model": "sql", "state": "running"}, 2),
        (names.ADAPTER_REQUESTS, {"model": "sql", "state": "waiting"}, 1),
        (vllm_names.WAITING_BY_REASON, {**VLLM, "reason": "capacity"}, 3),
        (vllm_names.WAITING_BY_REASON, {**VLLM, "reason": "deferred"}, 2),
        (vllm_names.ACCEPTED_BY_POSITION, {**VLLM, "position": "0"}, 50),
        (vllm_names.ACCEPTED_BY_POSITION, {**VLLM, "position": "1"}, 20),
        (vllm_names.TOKENS_BY_SOURCE, {**VLLM, "source": "local_cache_hit"}, 0),
        (vllm_names.CACHE_CONFIG, {**VLLM, "block_size": "16", "num_gpu_blocks": "120"}, 1),
        (names.MODEL_INFO, MODEL_INFO, 1),
        # kept elsewhere
        (names.CONNECTIONS, {}, 2),
        (names.LOG_MESSAGES, {"level": "warning", "result": "left_out"}, 3),
        (names.ENGINE_FEATURE, {"feature": "attention"}, 1),
        # counters with known labels, from the start
        (names.PROMPT_TOKENS, {"operation": "chat", "model": "demo"}, 0),
        (names.QUEUE_WAIT_SECONDS, {"reason": "no_blocks"}, 0),
        (vllm_names.REQUEST_SUCCESS, {**VLLM, "finished_reason": "abort"}, 0),
        (names.REFUSED_ACCESS, {"reason": "unknown_key"}, 0),
        (names.REJECTED, {"reason": "context_length_exceeded"}, 0),
        (names.REJECTED, {"reason": "rate_limited"}, 0),
        (names.READ_AGAIN_TOKENS, {"reason": "evicted"}, 0),
    ],
    ids=lambda value: value.name if isinstance(value, Metric) else str(value),
)
def test_a_number_is_on_the_page_before_any_request(
    metric: Metric, labels: dict[str, str], value: float, metrics: Metrics
) -> None:
    assert samples(metrics)[key(metric.name, **labels)] == value


@pytest.mark.parametrize(
    ("outcome", "status", "error"),
    [
        (Outcome.FINISHED, 200, None),
        (Outcome.FAILED, 200, InternalError),
        (Outcome.FAILED, 200, Unavailable),
        (Outcome.FAILED, 500, InternalError),
        (Outcome.REJECTED, 429, Overloaded),
        (Outcome.REJECTED, 503, Unavailable),
    ],
)
@pytest.mark.parametrize("operation", sorted(request_series.OPERATIONS))
def test_the_first_request_that_an_objective_counts_increments_a_series(
    operation: str, outcome: Outcome, status: int, error: type[APIError] | None, metrics: Metrics, make_record
) -> None:
    """PromQL's `increase` of a series that appears with a first burst of refusals does not have this burst."""
    assert_increments(metrics, make_record, operation, outcome, status, error)


@pytest.mark.parametrize(("outcome", "status"), [(Outcome.FAILED, 200), (Outcome.REJECTED, 503)])
def test_the_first_response_that_cannot_be_stored_increments_a_series(
    outcome: Outcome, status: int, metrics: Metrics, make_record
) -> None:
    assert_increments(metrics, make_record, "responses", outcome, status, StoreFailed)


def assert_increments(
    metrics: Metrics, make_record, operation: str, outcome: Outcome, status: int, error: type[APIError] | None
) -> None:
    before = samples(metrics)
    error_type = error and error.__name__
    metrics.observe(make_record(operation=operation, outcome=outcome, http_status=status, error_type=error_type))
    after = samples(metrics)
    increased = {
        sample: number - before[sample]
        for sample, number in after.items()
        if sample[0] in (names.REQUESTS.name, names.REJECTED.name) and number
    }
    assert list(increased.values()) == [1] * (1 + (outcome is Outcome.REJECTED))


def test_adapters_are_on_the_page_as_long_as_they_are_loaded(metrics: Metrics, snapshot: EngineNumbers) -> None:
    labels = {**VLLM, "max_lora": str(MOST_ADAPTERS)}
    alias = key(vllm_names.LORA_REQUESTS.name, **labels, running_lora_adapters="sql", waiting_lora_adapters="sql")
    assert samples(metrics)[alias] > 1e9
    snapshot.adapters = {"other": (0, 0)}
    page = samples(metrics)
    name = names.ADAPTER_REQUESTS.name
    assert key(name, model="sql", state="running") not in page
    assert page[key(name, model="other", state="running")] == page[key(name, model="other", state="waiting")] == 0


def test_an_engine_without_blocks_yet_uses_none(metrics: Metrics, snapshot: EngineNumbers) -> None:
    snapshot.blocks_used = snapshot.blocks_reusable = snapshot.blocks_total = 0
    assert samples(metrics)[key(names.KV_CACHE_USAGE.name)] == 0


def test_the_constructor_does_not_read_the_snapshot() -> None:
    metrics_of(snapshot=lambda: pytest.fail("the engine was asked"))


@pytest.mark.parametrize("drain", [Metrics.update, lambda metrics: metrics.render(None)], ids=["update", "render"])
def test_every_step_is_counted_once(drain: Callable[[Metrics], Any]) -> None:
    waiting = [
        StepRecord(StepKind.PREFILL, 0, 20_000_000, 0, 1, 100),
        StepRecord(StepKind.DECODE, 0, 5_000_000, 10, 3, 3),
        StepRecord(StepKind.DECODE, 0, 7_000_001, 10, 4, 4),
    ]

    def take_steps() -> list[StepRecord]:
        taken = waiting.copy()
        waiting.clear()
        return taken

    metrics = metrics_of(take_steps=take_steps)
    drain(metrics)
    assert waiting == []
    for _ in range(2):
        page = samples(metrics)
        assert page[key(f"{names.ENGINE_STEP_SECONDS.name}_sum", kind="decode")] == 0.012000001
        assert page[key(f"{names.ENGINE_STEP_SECONDS.name}_bucket", kind="decode", le="0.005")] == 1
        assert page[key(f"{names.ENGINE_STEP_SECONDS.name}_count", kind="prefill")] == 1
        assert page[key(f"{names.ENGINE_STEP_SEQUENCES.name}_sum")] == 8
        assert page[key(f"{names.ENGINE_STEP_TOKENS.name}_bucket", le="4.0")] == 2
        assert page[key(f"{vllm_names.STEP_TOKENS.name}_bucket", **VLLM, le="8.0")] == 2
        assert page[key(f"{vllm_names.STEP_TOKENS.name}_sum", **VLLM)] == 107


# -- names, labels, formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_metric_in_names_is_on_the_page_and_no_other(form: str, full: Metrics) -> None:
    suffix = {"counter": "_total", "info": "_info"}
    on_page = {
        (family.name + suffix.get(family.type, ""), family.type, family.documentation): {
            frozenset(sample.labels.keys() - {"le"}) for sample in family.samples
        }
        for family in families(full.render(form)[0], form)
        if not family.name.startswith(("process_", "python_"))
    }
    kinds = {} if "openmetrics" in form else {"info": "gauge"}
    assert on_page == {(m.name, kinds.get(m.type, m.type), m.help): {frozenset(m.labels)} for m in ALL}


def test_a_metric_of_a_plugin_is_on_the_page_with_its_present_number(metrics: Metrics) -> None:
    rows = [1]
    ledger = metric_named("oaiserve_ledger_rows", "Rows of the ledger.")

    metrics.show(ledger, lambda: {(): len(rows)})
    rows.append(2)

    assert samples(metrics)[key("oaiserve_ledger_rows")] == 2


def test_openmetrics_has_the_units(full: Metrics) -> None:
    page = full.render(OPENMETRICS)[0]
    units = {family.name: family.unit for family in families(page, OPENMETRICS) if family.unit}
    assert units == {m.name.removesuffix("_total"): m.unit for m in ALL if m.unit}


def test_process_metrics_are_on_the_page(metrics: Metrics) -> None:
    page = metrics.render(None)[0].decode()
    assert [name for name in PROCESS_METRICS if f"\n{name}" not in page] == []


def test_process_metrics_do_not_go_back_between_formats(metrics: Metrics) -> None:
    """Both are collected at once, and kept for a second."""
    pages = [samples(metrics, form) for form in (TEXT, OPENMETRICS) * 10]
    cpu_seconds = [page[key("process_cpu_seconds_total")] for page in pages]
    assert cpu_seconds == sorted(cpu_seconds)


@pytest.mark.parametrize("metric", [m for m in names.METRICS if m.buckets], ids=lambda m: m.name)
def test_buckets_rise_and_begin_with_short_times(metric: Metric) -> None:
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.buckets[0] <= (0.001 if metric.unit == "seconds" else 1)


def test_there_are_no_created_series(full: Metrics) -> None:
    assert b"_created" not in full.render(TEXT)[0] + full.render(OPENMETRICS)[0]


def test_the_build_has_versions_and_model(metrics: Metrics) -> None:
    page = metrics.render(None)[0].decode()
    assert 'oaiserve_build_info{model="demo",python="3.' in page
    assert 'version="1.2.3"} 1.0' in page


@pytest.mark.parametrize("form", FORMS)
@given(model=st.text(st.characters(exclude_categories=["Cs"])))
@example(model='100 % "own" %s\\n\n')
@settings(max_examples=12)
def test_any_served_name_can_be_a_label(form: str, model: str, make_record) -> None:
    metrics = metrics_of(model=model)
    metrics.observe(make_record())
    page = samples(metrics, form)
    assert page[key(names.PROMPT_TOKENS.name, operation="chat", model=model)] == 4
    assert page[key(f"{names.DURATION_SECONDS.name}_count", **LABELS | {"model": model})] == 1


def test_a_bounded_number_of_adapters_have_series(make_record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_series, "MOST_NAMES", 2)
    metrics = metrics_of()
    for name in ("a", "b", "c", "d", "a"):
        metrics.observe(make_record(model=name, adapter=name))
    count = f"{names.DURATION_SECONDS.name}_count"
    counts = {
        model: samples(metrics).get(key(count, **LABELS | {"model": model})) for model in ("a", "b", "c", "other")
    }
    assert counts == {"a": 2, "b": 1, "c": None, "other": 2}


def test_a_lone_surrogate_in_a_name_does_not_break_the_page() -> None:
    assert "demo?" in metrics_of(model="demo\ud800").render(None)[0].decode()


TEXTS = {"model": st.text(), "operation": st.text(), "error_type": st.text()}
TEXTS["finish_reasons"] = st.lists(st.text(), max_size=3).map(tuple)


@given(st.lists(st.builds(replace, records(), **TEXTS, http_status=st.integers()), max_size=20))
@settings(max_examples=12)
def test_labels_have_few_values_whatever_records_say(hostile: list[RequestRecord]) -> None:
    metrics = metrics_of()
    for record in hostile:
        metrics.observe(record)
    values = defaultdict[str, set[str]](set)
    for _, labels in of_records(samples(metrics)):
        for label, value in labels:
            values[label].add(value)
    assert values["model"] <= {"demo"}
    assert values["operation"] <= request_series.OPERATIONS | {"other"}
    assert values["error_type"] <= kinds_of(APIError).keys() | {"", "other"}
    assert values["reason"] <= {"stop", "length", "abort", "other", *WaitReason, *ReadAgain}
    groups = {"none", "other", *(f"{digit}xx" for digit in "12345")}
    assert all(100 <= int(value) <= 599 for value in values["status"] - groups)


def test_an_exemplar_is_the_last_value_of_its_bucket_at_the_end_of_its_request(metrics: Metrics, make_record) -> None:
    for last in [make_record() for _ in range(3)]:
        metrics.observe(last)
    exemplars = {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in families(metrics.render(OPENMETRICS)[0], OPENMETRICS)
        for sample in family.samples
        if sample.exemplar and family.name in (names.DURATION_SECONDS.name, vllm_names.DURATION.name)
    }
    shown = (names.DURATION_SECONDS, vllm_names.DURATION)
    assert exemplars.keys() == {(f"{metric.name}_bucket", "0.5") for metric in shown}
    assert b"trace_id" not in metrics.render(None)[0]
    for exemplar in exemplars.values():
        assert exemplar.labels == {"trace_id": f"{0xABC:032x}"}
        assert exemplar.value == last.times.duration_ns / 1e9
        assert float(exemplar.timestamp) == pytest.approx(1_700_000_000 + last.times.responded / 1e9, abs=1e-6)


def test_requests_that_end_within_two_milliseconds_leave_exemplars_of_the_first_only(
    metrics: Metrics, make_record
) -> None:
    """Prometheus warns of exemplars of one bucket that have the same millisecond, or an earlier one."""
    record = make_record()
    for later_ns, span_id in ((0, 1), (1_999_999, 2), (-5_000_000, 3), (2_000_000, 4), (2_500_000, 5)):
        times = replace(record.times, responded=record.times.responded + later_ns)
        metrics.observe(replace(record, times=times, trace=replace(record.trace, trace_id=span_id)))
        traces = set(re.findall(rb'trace_id="0*(\d+)"', metrics.render(OPENMETRICS)[0]))
        assert traces in ({b"1"}, {b"4"}, {b"1", b"4"}), "the others ended too soon after these"
        assert (b"4" in traces) == (span_id >= 4)


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        *((accept, Form.TEXT) for accept in (None, "", "*/*")),
        ("text/plain;version=nonsense", Form.TEXT),
        ("text/plain;version=1.0.0;escaping=dots", Form.TEXT),
        ("application/openmetrics-text;version=0.0.1", Form.TEXT),
        ("application/openmetrics-text", Form.OPENMETRICS),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3",
            Form.OPENMETRICS,
        ),
        ("application/openmetrics-text;version=2.0.0", Form.TEXT),
        ("application/openmetrics-text;version=2.0.0,application/openmetrics-text;version=1.0.0", Form.OPENMETRICS),
        (f"{PROTOBUF};q=0.6,application/openmetrics-text;version=1.0.0;q=0.5", Form.OPENMETRICS),
        (f"{PROTOBUF},text/html", Form.TEXT),
    ],
)
def test_render_negotiates_the_format(accept: str | None, form: Form, metrics: Metrics) -> None:
    page, chosen = metrics.render(accept)
    assert chosen == form.value
    assert page.endswith(b"# EOF\n") is (form is Form.OPENMETRICS)


# -- threads ----------------------------------------------------------------------------------------------------------


class WatchedLock:
    """A lock that releases `came` whenever a thread is about to acquire it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.came = Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_callers_that_arrive_while_a_page_is_rendered_share_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [*FORMS] * 3
    snapshots = []
    is_making = Event()
    go_on = Event()

    def snapshot() -> EngineNumbers:
        snapshots.append(1)
        is_making.set()
        assert go_on.wait(60)
        return EngineNumbers()

    lock = WatchedLock()
    monkeypatch.setattr("oaiserve.telemetry.metrics.Lock", lambda: lock)
    metrics = metrics_of(snapshot=snapshot)
    with ThreadPoolExecutor(1 + len(forms)) as threads:
        threads.submit(metrics.render, TEXT)
        assert is_making.wait(60)
        renderings = [threads.submit(metrics.render, form) for form in forms]
        assert all(lock.came.acquire(timeout=60) for _ in range(1 + len(forms)))
        go_on.set()
    assert len(snapshots) == 1 + len(FORMS)
    for form in FORMS:
        page, *others = [one.result()[0] for one, of_form in zip(renderings, forms, strict=True) if of_form == form]
        assert all(other is page for other in others)
        assert page.endswith(b"# EOF\n") is ("openmetrics" in form)


def test_a_page_that_failed_to_render_is_not_shared() -> None:
    metrics = metrics_of(snapshot=Mock(side_effect=[RuntimeError("the engine is gone"), EngineNumbers()]))
    with pytest.raises(RuntimeError, match="the engine is gone"):
        metrics.render(None)
    assert metrics.render(None)[0]


def test_all_numbers_of_a_page_are_of_one_moment(make_record) -> None:
    metrics = metrics_of()
    record = make_record()

    def write() -> None:
        for _ in range(1000):
            metrics.observe(record)
            metrics.count(names.SPANS, "ended", 1)
            metrics.observe_event_loop_lag(0.001)

    writer = Thread(target=write)
    writer.start()
    count = 0.0
    while writer.is_alive() or count == 0:
        page = samples(metrics)
        count = page.get(key(f"{names.DURATION_SECONDS.name}_count", **LABELS), 0)
        if not count:
            continue
        per_record = expected([record])
        for sample, value in of_records(page).items():
            assert math.isclose(value, count * per_record[sample], rel_tol=1e-12)
    writer.join()
    page = samples(metrics)
    assert page[key(names.SPANS.name, result="ended")] == 1000
    for name, labels in ((names.DURATION_SECONDS.name, LABELS), (names.EVENT_LOOP_LAG_SECONDS.name, {})):
        assert page[key(f"{name}_count", **labels)] == 1000
