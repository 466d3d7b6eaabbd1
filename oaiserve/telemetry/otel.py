"""OpenTelemetry's variables that choose the exporter of traces.

The SDK's exporters read the other variables themselves: endpoints, headers, timeouts, compression, certificates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from oaiserve.errors import StartupError
from oaiserve.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource


def exporter_kind(environ: Mapping[str, str]) -> Literal["otlp", "console"] | None:
    """Return the kind of exporter from the variables, or None if there is no export. Raises StartupError for an
    unsupported exporter."""
    if _value(environ, "OTEL_SDK_DISABLED")[1].lower() == "true":
        return None
    exporter_variable, name = _value(environ, "OTEL_TRACES_EXPORTER")
    endpoint_variable, endpoint = _value(environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = name.lower() or ("otlp" if endpoint else "none")
    if exporter == "none":
        return None
    if exporter == "console":
        return "console"
    if exporter != "otlp":
        raise StartupError(f"{exporter_variable} is '{name}'; this server supports otlp, console and none.")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise StartupError(f"{endpoint_variable} is '{endpoint}'; it must start with http:// or https://.")
    protocol_variable, protocol = _value(environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise StartupError(
            f"{protocol_variable} is '{protocol}', but this server exports traces over http/protobuf only; "
            "set it to that and the endpoint to the collector's HTTP port, usually 4318."
        )
    return "otlp"


def positive_integer(environ: Mapping[str, str], variable: str, default: int) -> int:
    """Return the value of a variable. Raises StartupError for an invalid one."""
    text = environ.get(variable, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise StartupError(f"{variable} is '{text}', but must be a whole number, at least 1.")
    return int(text)


def resource(version: str, service: str = names.SERVICE_NAME) -> Resource:
    """Return the OpenTelemetry resource of this process, for exported data.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the defaults.
    """
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource

    defaults = Resource({SERVICE_NAME: service, SERVICE_VERSION: version})
    return Resource.create(defaults.merge(OTELResourceDetector().detect()).attributes, names.RESOURCE_SCHEMA)


def _value(environ: Mapping[str, str], *variables: str) -> tuple[str, str]:
    """Return name and value of the first variable with a value. An empty value counts as none."""
    values = ((name, environ[name].strip()) for name in variables if environ.get(name, "").strip())
    return next(values, (variables[0], ""))
