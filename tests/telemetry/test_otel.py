"""The standard OTEL_ variables choose the exporter of traces."""

import os
import subprocess
import sys

import pytest

from oaiserve.errors import StartupError
from oaiserve.telemetry.otel import exporter_kind, positive_integer, resource

COLLECTOR = "http://collector:4318"
OTLP = {"OTEL_TRACES_EXPORTER": "otlp"}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": COLLECTOR}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": COLLECTOR}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "Console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "TRUE"}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp"),
        (OTLP | {"OTEL_EXPORTER_OTLP_TIMEOUT": " 2.5", "OTEL_EXPORTER_OTLP_COMPRESSION": "GZip"}, "otlp"),
        (OTLP | {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer x==, b=,"}, "otlp"),
        (OTLP | {"OTEL_EXPORTER_OTLP_CERTIFICATE": __file__}, "otlp"),
    ],
)
def test_the_variables_choose_the_exporter(environ: dict[str, str], kind: str | None) -> None:
    assert exporter_kind(environ) == kind


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "statsd"}, "OTEL_TRACES_EXPORTER is 'statsd'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318'"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR},
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is 'c'",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc', but this server exports traces over http/protobuf only",
        ),
        (OTLP | {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "TIMEOUT is 'soon', but must be a number of seconds above 0"),
        (OTLP | {"OTEL_EXPORTER_OTLP_TIMEOUT": "-5"}, "OTEL_EXPORTER_OTLP_TIMEOUT is '-5'"),
        (OTLP | {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "nan"}, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT is 'nan'"),
        (OTLP | {"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}, "COMPRESSION is 'zip', .* one of none, gzip, deflate"),
        (OTLP | {"OTEL_EXPORTER_OTLP_HEADERS": "a=b,secret"}, "a part of it has no '='"),
        (OTLP | {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/none.pem"}, "CERTIFICATE is '/none.pem', which cannot be read"),
        (OTLP | {"OTEL_EXPORTER_OTLP_CLIENT_KEY": "/none.pem"}, "CLIENT_KEY is '/none.pem', which cannot be read"),
    ],
)
def test_an_unsupported_exporter_stops_the_start(environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        exporter_kind(environ)


def test_a_limit_that_the_sdk_refuses_at_its_import_stops_the_start() -> None:
    environ = os.environ | {"OTEL_TRACES_EXPORTER": "console", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many"}
    script = "from oaiserve.telemetry import check_tracing; check_tracing()"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert "StartupError: An OTEL_ variable has a value that OpenTelemetry rejects: OTEL_SPAN_ATTRIBUTE" in done.stderr


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
