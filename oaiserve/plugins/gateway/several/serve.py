"""Serves several models until a signal."""

from __future__ import annotations

import faulthandler
import logging
import socket
from collections.abc import Mapping, Sequence

from oaiserve import __version__
from oaiserve.checkpoints import demo
from oaiserve.checkpoints.progress import Doing
from oaiserve.commands.banner import Banner, address, places
from oaiserve.commands.file_checks import warn_of_exposed_keys
from oaiserve.commands.listening import page_of_request, run_until_signal
from oaiserve.commands.servers import announced
from oaiserve.config import Config
from oaiserve.http.connections import allowed_connections
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import check
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.several.app import create_front
from oaiserve.run_engine import STDERR, end_load, prepare_process
from oaiserve.runtime import THREADS
from oaiserve.telemetry import check_tracing, logs


def serve_models(config: Config, configs: Mapping[str, Config], plugins: Sequence[Plugin], sock: socket.socket) -> int:
    """Serve several models until a signal, and return the exit code. Raises StartupError."""
    prepare_process()
    server = config.server
    url = address(server, sock.getsockname()[1])
    logs.configure(
        server.log_level,
        server.log_format,
        address_of=lambda request_id: page_of_request(app.state.pages, url, request_id),
    )
    faulthandler.enable(STDERR)
    warn_of_exposed_keys(config)
    check(plugins, config)
    check_tracing()
    if any(config.model == "demo" for config in configs.values()):
        with Doing("Fetching the demo", lambda: "", logging.getLogger(__name__).info):
            demo.fetched()
    app, front, metrics = create_front(config, configs, plugins)
    end_load()
    has_pages = bool(app.state.pages.links)
    on_demand = config.of(ModelsOptions).load_on_demand
    banner = banner_of_models(config, [*configs], url, on_demand=on_demand, has_pages=has_pages)
    with announced(url, ", ".join(configs)):
        connections = allowed_connections(server, THREADS.clock_ns)
        metrics.show(connections)
        models = front.models
        run_until_signal(app, config, sock, connections, banner, on_drain=front.drain, failure=lambda: models.failure)
    if models.failure is None:
        return 0
    return 1


def banner_of_models(
    config: Config, names: Sequence[str], url: str, *, on_demand: bool, has_pages: bool = True
) -> Banner:
    when = "loaded when a request names it" if on_demand else "loading now"
    facts = {"Models": ", ".join(names), "Runs on": f"one engine process per model, {when}"}
    shown = places(config, url, "Chat", has_pages=has_pages)
    return Banner(f"oaiserve {__version__} serves {len(names)} models at {url}/v1", {**facts, **shown})
