"""`config_of` makes the settings of a replica from Ray Serve's arguments of the application.

They are the settings of `oaiserve serve`, written as flags without leading dashes (`max-running`) or as in Python
(`max_running`). Values are text from a command line, and have types from a YAML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

from oaiserve.config import HAS_FLAG, Config, EngineOptions, OptionError, ServerOptions, TelemetryOptions
from oaiserve.explain.commands import message_of

# Replicas choose their ports. The gateway in front has the other settings of a listener.
LISTENER_SETTINGS = {"host", "port", "tls-certificate", "tls-key"}


def config_of(args: Mapping[str, Any]) -> Config:
    """Return the settings of a replica. Raises OptionError for an unknown or wrong one, or one of the listener."""
    settings = {name.replace("_", "-"): value for name, value in args.items() if value is not None}
    model = settings.pop("model", None)
    if not isinstance(model, str) or not model:
        raise OptionError("'model' is missing. Give a folder, a .gguf file, a hub id, or demo, as in: model=demo")
    for name in sorted(LISTENER_SETTINGS & settings.keys()):
        raise OptionError(
            f"'{name}' is not a setting of a replica, which chooses its port: clients reach it by `oaiserve route`."
        )
    app = App(
        config=Dict(settings, source="Ray's arguments"),
        default_parameter=Parameter(name="*", negative_iterable=(), parse=HAS_FLAG),
    )

    @app.default
    def config(
        *,
        # Clients anywhere connect through the gateway, so routes that are only for loopback stay closed.
        server: ServerOptions = ServerOptions(host="0.0.0.0"),  # noqa: B008 - frozen
        engine: EngineOptions = EngineOptions(),  # noqa: B008
        telemetry: TelemetryOptions = TelemetryOptions(),  # noqa: B008
    ) -> Config:
        return Config(model, server, engine, telemetry)

    try:
        parsed: Config = app(
            ["--host", "0.0.0.0"], print_error=False, exit_on_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        raise OptionError(message_of(error, "oaiserve serve")) from error
    return parsed
