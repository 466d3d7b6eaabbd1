"""A gateway: for servers that run elsewhere (`oaiserve route`), or for several models with an engine process each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oaiserve.plugin import Command, Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.gateway.options import ModelsOptions

if TYPE_CHECKING:
    import socket

    from oaiserve.config import Config


def _serve(models: Sequence[str], config: Config, plugins: Sequence[Plugin]) -> Callable[[socket.socket], int] | None:
    from oaiserve.commands.file_checks import check_files, check_tls
    from oaiserve.config import OptionError
    from oaiserve.explain.commands import settings_in
    from oaiserve.plugins.gateway.several.settings import holds_models, models_of

    tables = {} if config.file is None else settings_in(config.file).get("models", {})
    if not models and not tables:
        return None
    has_options = config.of(ModelsOptions) != ModelsOptions()
    if not (len(models) > 1 or tables or has_options or holds_models(models[0])):
        return None
    if config.server.front_processes > 1:
        raise OptionError("--front-processes is for one model. For several, start servers behind 'oaiserve route'.")
    config = replace(config, model="models")
    configs = models_of(models, tables, config, plugins)
    check_tls(config.server.tls_certificate, config.server.tls_key)
    for each in configs.values():
        check_files(each.server, each.engine, each.telemetry, plugins)

    from oaiserve.plugins.gateway.several.serve import serve_models  # its import is slow

    return partial(serve_models, config, configs, plugins)


plugin = Plugin(
    name="gateway",
    commands={
        "route": Command(
            "Run a gateway, which sends each request to the server that has most of its prompt cached.",
            f"{__name__}.command",
            has_settings=True,
        )
    },
    options={"Several models": ModelsOptions},
    inner=InnerParts(tables=("models",), serve=_serve),
)
