"""`config_of` makes the settings of a replica from Ray Serve's arguments of the application.

They are those of `oaiserve serve`, written as flags without dashes (`max-running`) or as in Python (`max_running`).
From a command line their values are text, from a YAML file they have types; both are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import msgspec

from oaiserve.config import Bytes, Config, EngineOptions, OptionError, ServerOptions, TelemetryOptions

# These are the front's: it listens, and connections are its own.
FRONT_SETTINGS = {
    *("host", "port", "front_ends", "tls_certificate", "tls_key", "max_connections", "max_connections_per_address"),
    *("write_timeout_seconds", "header_timeout_seconds", "idle_timeout_seconds"),
}


def config_of(args: Mapping[str, Any]) -> Config:
    """Return the settings of a replica. Raises OptionError for an unknown or wrong one, or one of the front."""
    given = {name.replace("-", "_"): value for name, value in args.items()}
    model = given.pop("model", None)
    if not isinstance(model, str) or not model:
        raise OptionError("'model' is missing. Give a folder, a .gguf file, a hub id, or demo, as in: model=demo")
    # Clients come from everywhere, through the front, so routes for loopback alone stay closed.
    server = ServerOptions(host="0.0.0.0", **_taken(ServerOptions, given))
    engine = EngineOptions(**_taken(EngineOptions, given))
    telemetry = TelemetryOptions(**_taken(TelemetryOptions, given))
    config = Config(model, server, engine, telemetry)
    for name in given:
        if name in FRONT_SETTINGS:
            raise OptionError(f"'{name}' is not a setting of a replica: the front in front of it listens.")
        names = [field.name for options in (server, engine, telemetry) for field in fields(options)]
        close = get_close_matches(name, {*names} - FRONT_SETTINGS, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else " 'oaiserve serve --help' lists the settings."
        raise OptionError(f"'{name}' is not a setting of oaiserve.{hint}")
    return config


def _taken(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of this kind from the given ones, with their types."""
    hints = get_type_hints(kind)
    own = [field for field in fields(kind) if field.name in given and field.name not in FRONT_SETTINGS]
    return {field.name: _value(field, hints[field.name], given.pop(field.name)) for field in own}


def _value(field: Field[Any], hint: Any, value: Any) -> Any:
    if isinstance(field.default, tuple) and not isinstance(value, list | tuple):
        value = (value,)  # a flag that may be repeated, given once
    if get_origin(hint) is Literal:
        return value  # the settings themselves say which words there are
    try:
        return msgspec.convert(value, hint, strict=False, dec_hook=_made)
    except msgspec.ValidationError as error:
        raise OptionError(f"'{field.name}' is {value!r}: {error}.") from error


def _made(kind: type, value: Any) -> Any:
    """Return a path or a size, which msgspec does not know."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is Bytes and isinstance(value, int | str):
        return Bytes(value)
    raise ValueError(f"expected {kind.__name__}")
