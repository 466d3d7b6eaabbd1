"""The standard OTEL_ variables choose the exporters of traces and metrics."""

from __future__ import annotations

import pytest

from oaiserve.errors import StartupError
from oaiserve.telemetry.otel_environment import Signal, export_interval_seconds, exporter_kind, resource

COLLECTOR = "http://collector:4318"
SIGNALS: tuple[Signal, ...] = ("traces", "metrics")


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_{}_ENDPOINT": COLLECTOR}, "otlp"),
        ({"OTEL_{}_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_{}_EXPORTER": "Console"}, "console"),
        ({"OTEL_{}_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, None),
        ({"OTEL_{}_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "TRUE"}, None),
        ({"OTEL_{}_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp"),
    ],
)
def test_the_variables_choose_the_exporter(signal: Signal, environ: dict[str, str], kind: str | None) -> None:
    named = {variable.format(signal.upper()): value for variable, value in environ.items()}
    assert exporter_kind(named, signal) == kind


def test_a_variable_for_one_signal_does_not_affect_the_other() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": COLLECTOR}
    assert (exporter_kind(environ, "traces"), exporter_kind(environ, "metrics")) == ("otlp", None)


def test_the_exporter_prometheus_needs_no_export() -> None:
    environ = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}
    assert exporter_kind(environ, "metrics") is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_METRICS_EXPORTER": "statsd"}, "OTEL_METRICS_EXPORTER is 'statsd'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318'"),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "c", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR},
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is 'c'",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL is 'grpc', but this server exports metrics over http/protobuf only",
        ),
    ],
)
def test_an_unsupported_exporter_stops_the_start(environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        exporter_kind(environ, "metrics")


def test_the_interval_is_a_minute_unless_set() -> None:
    assert export_interval_seconds({}) == 60
    assert export_interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": "2500"}) == 2.5


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "²"])
def test_an_invalid_interval_stops_the_start(text: str) -> None:
    with pytest.raises(StartupError, match=f"OTEL_METRIC_EXPORT_INTERVAL is '{text}', but must be a number of milli"):
        export_interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": text})


def test_the_resource_is_oaiserve_unless_the_variables_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource("1.2.3").attributes["service.name"] == "oaiserve"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge-llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    attributes = resource("1.2.3").attributes
    assert (attributes["service.name"], attributes["service.version"]) == ("edge-llm", "1.2.3")
    assert attributes["deployment.environment.name"] == "test"
