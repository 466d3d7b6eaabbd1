"""Reads and checks OpenTelemetry's variables for the export of traces.

The SDK's exporters read the other variables themselves: endpoints, headers, timeouts, compression, certificates. For
most invalid values, they would only log a warning, and some values would lose every span.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from oaiserve.errors import StartupError
from oaiserve.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource


# The propagators in OpenTelemetry's specification. Platforms may set them for all programs.
_PROPAGATORS = {"tracecontext", "baggage", "b3", "b3multi", "jaeger", "ottrace", "xray"}
_HEADER = re.compile(r"[!#-'*+.0-9A-Z^-z|~-]+[ \t]*=[ !#-+\--:<-\[\]-~]*")
_COMPRESSIONS = ("none", "gzip", "deflate")


def exporter_kind(environ: Mapping[str, str]) -> Literal["otlp", "console"] | None:
    """Return the kind of exporter that the variables select, or None for no export. Raises StartupError for an
    unsupported exporter."""
    if _value(environ, "OTEL_SDK_DISABLED")[1].lower() == "true":
        return None
    exporter_variable, name = _value(environ, "OTEL_TRACES_EXPORTER")
    endpoint_variable, endpoint = _value(environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = name.lower() or ("otlp" if endpoint else "none")
    if exporter == "none":
        return None
    _check_spans(environ)
    if exporter == "console":
        return "console"
    if exporter != "otlp":
        raise StartupError(f"{exporter_variable} is '{name}'; this server supports otlp, console and none.")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise StartupError(f"{endpoint_variable} is '{endpoint}'; it must start with http:// or https://.")
    if endpoint and not _is_url(endpoint):
        raise StartupError(f"{endpoint_variable} is {endpoint!r}, which is not a URL such as http://collector:4318.")
    protocol_variable, protocol = _value(environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise StartupError(
            f"{protocol_variable} is '{protocol}', but this server exports traces over http/protobuf only; "
            "set it to that and the endpoint to the collector's HTTP port, usually 4318."
        )
    _check_otlp(environ)
    return "otlp"


def trim(environ: MutableMapping[str, str]) -> None:
    """Strip whitespace from the values of OpenTelemetry's variables, such as the line end of a value that comes from a
    file. The SDK strips few of them, so spans would be lost, or a sampler replaced by the default."""
    for name, value in list(environ.items()):
        if name.startswith("OTEL_") and value != value.strip():
            environ[name] = value.strip()


def _is_url(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        return False
    return bool(parts.hostname) and endpoint.isprintable() and " " not in endpoint


def _is_header(pair: str) -> bool:
    """Return whether the SDK can parse and send this header. It drops any other header with a warning that quotes
    it."""
    return _HEADER.fullmatch(pair.strip()) is not None and unquote(pair).strip().isprintable()


def _check_spans(environ: Mapping[str, str]) -> None:
    """Raise StartupError for values that the SDK would ignore, or that this server doesn't support."""
    variable, text = _value(environ, "OTEL_PROPAGATORS")
    given = {name.strip().lower() for name in text.split(",") if name.strip()}
    if text and ("tracecontext" not in given or not given <= _PROPAGATORS):
        raise StartupError(
            f"{variable} is '{text}', but this server reads a client's trace from 'traceparent' alone: the value must "
            f"be tracecontext, or name it next to others of {', '.join(sorted(_PROPAGATORS))}."
        )
    variable, text = _value(environ, "OTEL_RESOURCE_ATTRIBUTES")
    if not all("=" in pair for pair in text.split(",") if pair.strip()):
        raise StartupError(f"{variable} is '{text}', but must have the form NAME=VALUE,NAME=VALUE.")


def _check_otlp(environ: Mapping[str, str]) -> None:
    """Raise StartupError for values that the exporter would replace by its default, or that make every export fail."""

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
    # A header may be a password, so no message quotes it.
    if not all("=" in header for header in text.split(",") if header.strip()):
        raise StartupError(f"{variable} must have the form NAME=VALUE,NAME=VALUE, but a part of it has no '='.")
    if not all(map(_is_header, filter(str.strip, text.split(",")))):
        raise StartupError(
            f"{variable} has a header that can't be sent. Write other characters in values as in URLs: %3B."
        )
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        variable, text = value_of(name)
        if text and not os.access(text, os.R_OK):
            raise StartupError(f"{variable} is '{text}', which cannot be read.")


def positive_integer(environ: Mapping[str, str], variable: str, default: int) -> int:
    """Return the value of a variable that must be a positive integer. Raises StartupError if it is not."""
    text = environ.get(variable, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise StartupError(f"{variable} is '{text}', but must be a whole number, at least 1.")
    return int(text)


def resource(version: str, service: str = names.SERVICE_NAME) -> Resource:
    """Return the OpenTelemetry resource that describes this process in exported data.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the defaults.
    """
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource

    defaults = Resource({SERVICE_NAME: service, SERVICE_VERSION: version})
    return Resource.create(defaults.merge(OTELResourceDetector().detect()).attributes, names.RESOURCE_SCHEMA)


def _value(environ: Mapping[str, str], *variables: str) -> tuple[str, str]:
    """Return the name and the value of the first variable that is set. An empty value counts as unset."""
    values = ((name, environ[name].strip()) for name in variables if environ.get(name, "").strip())
    return next(values, (variables[0], ""))
