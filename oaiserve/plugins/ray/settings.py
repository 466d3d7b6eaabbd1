"""`config_of` makes the settings of a replica from Ray Serve's arguments of the application.

They are the settings of `oaiserve serve`, written as flags without leading dashes (`max-running`) or as in Python
(`max_running`). Values are text from a command line, and have types from a YAML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyclopts import CycloptsError
from cyclopts.config import Dict

from oaiserve.commands.settings import options_in
from oaiserve.config import Config, OptionError
from oaiserve.explain.commands import message_of
from oaiserve.plugin_loading import options_of, own_plugins

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
    try:
        # Clients anywhere connect through the gateway, so routes that are only for loopback stay closed.
        stated = Dict(settings, source="Ray's arguments")
        return Config(model, **options_in(["--host", "0.0.0.0"], stated, options_of(own_plugins())))
    except CycloptsError as error:
        raise OptionError(message_of(error, "oaiserve serve")) from error
