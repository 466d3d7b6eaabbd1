"""Parse a page for /metrics with the parsers of the Prometheus client library."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oaiserve.telemetry.metrics import Metrics

TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text; version=1.0.0"
FORMS = (TEXT, OPENMETRICS)

Key = tuple[str, frozenset[tuple[str, str]]]


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def families(page: bytes, form: str) -> list[Metric]:
    parse = parse_openmetrics if form == OPENMETRICS else parse_text
    return list(parse(page.decode()))


def samples(metrics: Metrics, form: str = TEXT) -> dict[Key, float]:
    return samples_on(metrics.render(form)[0], form)


def samples_on(page: bytes, form: str = TEXT) -> dict[Key, float]:
    """Return the samples of a page by name and labels, with the same spelling of `le` in both formats."""
    found: dict[Key, float] = {}
    for family in families(page, form):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            assert key(sample.name, **labels) not in found, f"{sample.name} {labels} is there twice"
            found[key(sample.name, **labels)] = sample.value
    return found
