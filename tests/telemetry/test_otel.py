"""The standard OTEL_ variables choose the exporter of traces."""

import os
import subprocess
import sys

import pytest

from oaiserve.errors import StartupError
from oaiserve.telemetry.otel import exporter_kind, positive_integer, resource, trim

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
        (OTLP | {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://[::1]:4318/some/path"}, "otlp"),
        (OTLP | {"OTEL_PROPAGATORS": "tracecontext, baggage,b3"}, "otlp"),
        ({"OTEL_PROPAGATORS": "unknown"}, None),
        (OTLP | {"OTEL_RESOURCE_ATTRIBUTES": "a=b,c=d=e,"}, "otlp"),
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
        (OTLP | {"OTEL_EXPORTER_OTLP_HEADERS": "a=b;c"}, "a header that can't be sent. Write .* as in URLs: %3B"),
        (OTLP | {"OTEL_EXPORTER_OTLP_HEADERS": "a=b%0Ac"}, "a header that can't be sent"),
        (OTLP | {"OTEL_EXPORTER_OTLP_HEADERS": "a b=c"}, "a header that can't be sent"),
        *(
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{rest}"}, "which is not a URL such as http://collector:4318")
            for rest in ("", ":4318", "a b", "a:99999", "a\n:1", "[::1")
        ),
        (OTLP | {"OTEL_PROPAGATORS": "tracecontxt"}, "OTEL_PROPAGATORS is 'tracecontxt', .* must be tracecontext"),
        (OTLP | {"OTEL_PROPAGATORS": "b3"}, "reads a client's trace from 'traceparent' alone"),
        (OTLP | {"OTEL_PROPAGATORS": "tracecontext,none"}, "or name it next to others of b3, b3multi, baggage, "),
        (
            {"OTEL_TRACES_EXPORTER": "console", "OTEL_RESOURCE_ATTRIBUTES": "a"},
            "'a', but must have the form NAME=VALUE",
        ),
        (OTLP | {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/none.pem"}, "CERTIFICATE is '/none.pem', which cannot be read"),
        (OTLP | {"OTEL_EXPORTER_OTLP_CLIENT_KEY": "/none.pem"}, "CLIENT_KEY is '/none.pem', which cannot be read"),
    ],
)
def test_an_unsupported_exporter_stops_the_start(environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        exporter_kind(environ)


BLANKS = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"{COLLECTOR}\n",
    "OTEL_EXPORTER_OTLP_HEADERS": " a=b \r\n",
    "OTEL_TRACES_SAMPLER": "always_off ",
    "OTEL_SERVICE_NAME": "\tedge",
}


def test_blanks_and_line_ends_around_values_change_nothing() -> None:
    script = """
import logging
import os
from oaiserve.runtime import THREADS
from oaiserve.telemetry import make_tracing, tracing
logging.basicConfig()
made = []
tracing.exporter = lambda kind, plain=tracing.exporter: made.append(plain(kind)) or made[0]
tracing = make_tracing(epoch_offset_ns=lambda: 0, version="1", count_spans=lambda *_: None, runtime=THREADS)
print(made[0]._endpoint)
print(tracing._sampling.sampler.get_description(), tracing._resource.attributes["service.name"])
tracing.close(1)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | BLANKS, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == [f"{COLLECTOR}/v1/traces", "AlwaysOffSampler", "edge"]


def test_only_opentelemetrys_variables_are_trimmed() -> None:
    environ = {"OTEL_X": " a\n", "OTHER": " a\n", "OTEL_Y": "b"}
    trim(environ)
    assert environ == {"OTEL_X": "a", "OTHER": " a\n", "OTEL_Y": "b"}


def test_an_unknown_provider_of_credentials_stops_the_start() -> None:
    variable = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER"
    environ = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, variable: "nope"}
    script = "from oaiserve.telemetry import check_tracing; check_tracing()"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert "StartupError: An OTEL_ variable has a value that OpenTelemetry rejects: Requested component" in done.stderr


def test_a_limit_that_the_sdk_refuses_at_its_import_stops_the_start() -> None:
    environ = os.environ | {"OTEL_TRACES_EXPORTER": "console", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many"}
    script = "from oaiserve.telemetry import check_tracing; check_tracing()"
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
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
