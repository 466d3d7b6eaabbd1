"""Metrics of a server, and the samples on their page by the parsers of the Prometheus client library."""

from dataclasses import replace
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.telemetry import names
from oaiserve.telemetry.metrics import Measured, Metrics

TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FORMS = (TEXT, OPENMETRICS)

Key = tuple[str, frozenset[tuple[str, str]]]


def metrics_of(**changes: Any) -> Metrics:
    elsewhere = {
        names.CONNECTIONS: lambda: {(): 2},
        names.CONNECTIONS_REFUSED: lambda: {("all",): 3},
        names.REFUSAL_DELAY_SECONDS: lambda: {(): 0.25},
        names.ENGINE_FEATURE: lambda: {("attention",): 1},
        names.ENGINE_RESTARTS: lambda: {(): 0},
        names.REPLICA_UP: lambda: {("0",): 1},
        names.REPLICA_RESTARTS: lambda: {("0",): 2},
        names.REPLICA_SEQUENCES: lambda: {("0", "running"): 3},
        names.REPLICA_KV_USED_RATIO: lambda: {("0",): 0.5},
        names.REPLICA_CHOICES: lambda: {("0", "prefix"): 4},
        names.METER_JOULES: lambda: {(): 812.5},
        names.LOG_MESSAGES: lambda: {("warning", "left_out"): 3},
    }
    measured = Measured(
        model="demo",
        version="1.2.3",
        snapshot=EngineNumbers,
        model_info={"dtype": "bfloat16", "block_size": "16"},
        elsewhere=elsewhere,
    )
    return Metrics(replace(measured, **changes), epoch_offset_ns=lambda: 1_700_000_000 * 10**9)


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def families(page: bytes, form: str) -> list[Metric]:
    return list((parse_text if form == TEXT else parse_openmetrics)(page.decode()))


def samples(metrics: Metrics, form: str = TEXT) -> dict[Key, float]:
    return samples_on(metrics.render(form)[0], form)


def samples_on(page: bytes, form: str = TEXT) -> dict[Key, float]:
    """Return the samples of a page by name and labels, with the same spelling of `le` in both formats."""
    samples: dict[Key, float] = {}
    for family in families(page, form):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            assert key(sample.name, **labels) not in samples, f"{sample.name} {labels} is there twice"
            samples[key(sample.name, **labels)] = sample.value
    return samples
