"""The standard OTEL_ variables choose the exporters of traces and metrics."""

from __future__ import annotations

import pytest

from oaiserve.errors import StartupError
from oaiserve.telemetry.otel import Signal, exporter_kind, positive_integer, resource

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
    environ = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}
    assert (exporter_kind(environ, "traces"), exporter_kind(environ, "metrics")) == ("otlp", None)


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


def test_a_number_of_a_variable_has_a_default() -> None:
    assert positive_integer({"OTEL_X": " "}, "OTEL_X", 60) == 60
    assert positive_integer({"OTEL_X": " 2500 "}, "OTEL_X", 60) == 2500


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "²"])
def test_an_invalid_number_stops_the_start(text: str) -> None:
    with pytest.raises(StartupError, match=f"OTEL_X is '{text}', but must be a whole number, at least 1."):
        positive_integer({"OTEL_X": text}, "OTEL_X", 60)


def test_the_resource_is_oaiserve_unless_the_variables_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource("1.2.3").attributes["service.name"] == "oaiserve"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge-llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    attributes = resource("1.2.3").attributes
    assert (attributes["service.name"], attributes["service.version"]) == ("edge-llm", "1.2.3")
    assert attributes["deployment.environment.name"] == "test"
