"""OpenTelemetry's variables that choose the exporter of traces.

The SDK's exporters read the other variables themselves: endpoints, headers, timeouts, compression, certificates. For
most invalid values they would only log a warning, and some would cost every span.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from oaiserve.errors import StartupError
from oaiserve.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource


_COMPRESSIONS = ("none", "gzip", "deflate")


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
    _check_otlp(environ)
    return "otlp"


def _check_otlp(environ: Mapping[str, str]) -> None:
    """Raise StartupError for a value that the exporter would replace by its default, or could never export with."""

    def value_of(name: str) -> tuple[str, str]:
        return _value(environ, f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}")

    variable, text = value_of("TIMEOUT")
    try:
        seconds = float(text or 10)
    except ValueError:
        seconds = 0
    if not 0 < seconds < math.inf:
        raise StartupError(f"{variable} is '{text}', but must be a number of seconds above 0.")
    variable, text = value_of("COMPRESSION")
    if text.lower() not in ("", *_COMPRESSIONS):
        raise StartupError(f"{variable} is '{text}', but must be one of {', '.join(_COMPRESSIONS)}.")
    variable, text = value_of("HEADERS")
    if not all("=" in header for header in text.split(",") if header.strip()):
        # A header may be a password, so the message doesn't quote it.
        raise StartupError(f"{variable} must have the form NAME=VALUE,NAME=VALUE, but a part of it has no '='.")
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        variable, text = value_of(name)
        if text and not os.access(text, os.R_OK):
            raise StartupError(f"{variable} is '{text}', which cannot be read.")


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
