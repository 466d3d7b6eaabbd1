"""Histograms, counters and gauges, and the page they are rendered to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oaiserve.telemetry import names
from oaiserve.telemetry.metrics import Metrics
from oaiserve.times import PHASES, Outcome

LABELS = {"outcome": "finished", "operation": "chat", "model": "demo"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry, snapshot: SimpleNamespace) -> Metrics:
    return Metrics(registry, lambda: snapshot, model="demo", version="1.2.3")


def test_sums_move_by_the_records_nanoseconds(metrics: Metrics, registry: CollectorRegistry, make_record) -> None:
    record = make_record()
    metrics.observe(record)
    metrics.observe(record)
    for phase in record.times.phases():
        total = registry.get_sample_value(f"{names.PHASE_SECONDS.name}_sum", LABELS | {"phase": phase.name})
        assert math.isclose(total, 2 * phase.duration_ns / 1e9, rel_tol=1e-9)
    total = registry.get_sample_value(f"{names.DURATION_SECONDS.name}_sum", LABELS)
    assert math.isclose(total, 2 * record.times.duration_ns / 1e9, rel_tol=1e-9)


def test_phase_sums_add_up_to_the_duration(metrics: Metrics, registry: CollectorRegistry, make_record) -> None:
    for num_stamps in range(1, 8):
        metrics.observe(make_record(num_stamps))
    phases = (registry.get_sample_value(f"{names.PHASE_SECONDS.name}_sum", LABELS | {"phase": p}) for p in PHASES)
    duration = registry.get_sample_value(f"{names.DURATION_SECONDS.name}_sum", LABELS)
    assert math.isclose(sum(phases), duration, rel_tol=1e-9)


def test_latencies_of_tokens(metrics: Metrics, registry: CollectorRegistry, make_record) -> None:
    record = make_record()
    metrics.observe(record)
    ttft = registry.get_sample_value(f"{names.TIME_TO_FIRST_TOKEN_SECONDS.name}_sum", LABELS)
    tpot = registry.get_sample_value(f"{names.TIME_PER_OUTPUT_TOKEN_SECONDS.name}_sum", LABELS)
    assert math.isclose(ttft, record.times.time_to_first_token_ns / 1e9, rel_tol=1e-9)
    assert math.isclose(tpot, record.times.phases()[5].duration_ns / 1e9 / 4, rel_tol=1e-9)


def test_choices_side_by_side_do_not_shorten_the_time_per_token(metrics, registry, make_record) -> None:
    record = make_record(completion_tokens=10, finish_reasons=("stop", "length"))
    metrics.observe(record)
    tpot = registry.get_sample_value(f"{names.TIME_PER_OUTPUT_TOKEN_SECONDS.name}_sum", LABELS)
    assert math.isclose(tpot, record.times.time_per_output_token_ns(5) / 1e9, rel_tol=1e-9)


def test_a_single_token_has_no_time_per_token(metrics, registry, make_record) -> None:
    metrics.observe(make_record(completion_tokens=1))
    assert registry.get_sample_value(f"{names.TIME_PER_OUTPUT_TOKEN_SECONDS.name}_count", LABELS) is None


def test_a_request_that_never_got_a_token_has_no_time_to_first_token(metrics, registry, make_record) -> None:
    metrics.observe(make_record(4))
    assert registry.get_sample_value(f"{names.TIME_TO_FIRST_TOKEN_SECONDS.name}_count", LABELS) is None
    assert registry.get_sample_value(f"{names.PHASE_SECONDS.name}_count", LABELS | {"phase": "prefill"}) is None


@pytest.mark.parametrize(
    ("outcome", "status", "error_type"),
    [
        (Outcome.FINISHED, 200, None),
        (Outcome.CANCELLED, None, None),
        (Outcome.REJECTED, 429, "Overloaded"),
        (Outcome.FAILED, 500, "InternalError"),
    ],
)
def test_each_outcome_is_counted(outcome, status, error_type, metrics, registry, make_record) -> None:
    metrics.observe(make_record(2, outcome=outcome, http_status=status, error_type=error_type))
    labels = LABELS | {"outcome": str(outcome), "status": str(status or ""), "error_type": error_type or ""}
    assert registry.get_sample_value(names.REQUESTS.name, labels) == 1


def test_tokens_are_counted(metrics: Metrics, registry: CollectorRegistry, make_record) -> None:
    metrics.observe(make_record())
    metrics.observe(make_record())
    labels = {"operation": "chat", "model": "demo"}
    counted = (names.PROMPT_TOKENS, names.CACHED_PROMPT_TOKENS, names.GENERATION_TOKENS)
    assert [registry.get_sample_value(metric.name, labels) for metric in counted] == [8, 4, 10]


def test_gauges_show_the_snapshot_of_the_moment(metrics, registry, snapshot) -> None:
    assert registry.get_sample_value(names.REQUESTS_RUNNING.name) == 3
    snapshot.num_running = 5
    assert registry.get_sample_value(names.REQUESTS_RUNNING.name) == 5
    assert registry.get_sample_value(names.KV_CACHE_USAGE.name) == 0.25
    assert registry.get_sample_value(names.KV_BLOCKS.name, {"state": "free"}) == 90
    assert registry.get_sample_value(names.ENGINE_STEPS.name) == 99


def test_an_engine_without_blocks_yet_uses_none(metrics, registry, snapshot) -> None:
    snapshot.blocks_used = snapshot.blocks_total = 0
    assert registry.get_sample_value(names.KV_CACHE_USAGE.name) == 0


def test_registering_asks_no_engine(registry: CollectorRegistry) -> None:
    Metrics(registry, lambda: pytest.fail("the engine was asked"), model="demo", version="0")


def test_build_info_names_version_and_model(metrics: Metrics) -> None:
    page = metrics.render(None)[0].decode()
    assert 'oaiserve_build_info{model="demo",python="' in page
    assert 'version="1.2.3"} 1.0' in page


def use_everything(metrics: Metrics, record) -> None:
    metrics.observe(record)
    metrics.count_error("log")
    metrics.count_spans("ended", 9)
    metrics.observe_event_loop_lag(0.001)


def test_every_metric_in_names_is_on_the_page_and_no_other(metrics: Metrics, make_record) -> None:
    use_everything(metrics, make_record())
    types = {"oaiserve_build": "info"}
    for family in parse_openmetrics(metrics.render(OPENMETRICS)[0].decode()):
        if family.name.startswith("oaiserve_"):
            types[family.name] = family.type
    suffix = {"counter": "_total", "info": "_info"}
    on_page = {(name + suffix.get(kind, ""), kind) for name, kind in types.items()}
    assert on_page == {(metric.name, metric.type) for metric in names.METRICS}


def test_labels_on_the_page_are_those_in_names(metrics: Metrics, make_record) -> None:
    use_everything(metrics, make_record(num_preemptions=1, stalled_ns=5))
    labels = {
        sample.name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum"): set(sample.labels) - {"le"}
        for family in parse_text(metrics.render(None)[0].decode())
        for sample in family.samples
    }
    assert {metric.name: labels[metric.name] for metric in names.METRICS} == {
        metric.name: set(metric.labels) for metric in names.METRICS
    }


def test_process_metrics_are_on_the_page(metrics: Metrics) -> None:
    page = metrics.render(None)[0].decode()
    assert [name for name in names.PROCESS_METRICS if f"\n{name}" not in page] == []


@pytest.mark.parametrize("metric", [m for m in names.METRICS if m.buckets], ids=lambda m: m.name)
def test_buckets_rise_from_fractions_of_a_millisecond(metric: names.Metric) -> None:
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.buckets[0] <= 0.001


def test_there_are_no_created_series(metrics: Metrics, make_record) -> None:
    metrics.observe(make_record())
    assert b"_created" not in metrics.render(None)[0] + metrics.render(OPENMETRICS)[0]


def test_exemplars_carry_the_trace_id_in_openmetrics_only(metrics: Metrics, make_record) -> None:
    metrics.observe(make_record())
    exemplar = b'# {trace_id="' + b"0" * 29 + b'abc"}'
    assert exemplar in metrics.render(OPENMETRICS)[0]
    assert b"trace_id" not in metrics.render(None)[0]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=nonsense", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_render_negotiates_the_format(accept: str | None, content_type: str, metrics: Metrics) -> None:
    page, chosen = metrics.render(accept)
    assert chosen == content_type
    assert page.endswith(b"# EOF\n") is content_type.startswith("application/openmetrics-text")


def test_the_stall_of_a_preempted_request_is_observed_and_no_other(metrics: Metrics, make_record) -> None:
    metrics.observe(make_record())
    metrics.observe(make_record(num_preemptions=2, stalled_ns=250_000_000))
    page = metrics.render(None)[0].decode()
    labels = '{model="demo",operation="chat"}'
    assert f"oaiserve_preemption_stall_seconds_count{labels} 1.0" in page
    assert f"oaiserve_preemption_stall_seconds_sum{labels} 0.25" in page
