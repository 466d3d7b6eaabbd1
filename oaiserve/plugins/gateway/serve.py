"""Serves as a gateway until a signal: in front of the processes of several models, or of servers elsewhere."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from oaiserve.plugins.gateway.app import create_gateway, create_gateway_of_models
from oaiserve.plugins.gateway.options import ModelsOptions, RouteOptions
from oaiserve.runtime import THREADS
from oaiserve.telemetry import logs

# How to close a gateway, which has no keys of its own.
SERVERS_KEYS_CLOSE = (
    "If the servers behind it require keys, set OAISERVE_REPLICA_KEY (--replica-key) to one of them. Otherwise start "
    "them with --api-key, or set --host 127.0.0.1 here to answer this machine only."
)


def serve_models(config: Config, configs: Mapping[str, Config], plugins: Sequence[Plugin], sock: socket.socket) -> int:
    """Serve several models until a signal, and return the exit code. Raises StartupError."""
    server = config.server
    port = sock.getsockname()[1]
    url = address(server, port)
    logs.configure(
        server.log_level,
        server.log_format,
        address_of=lambda request_id: page_of_request(app.state.pages, url, request_id),
    )
    # A model's process logs the address of this one.
    configs = {name: replace(config, server=replace(config.server, port=port)) for name, config in configs.items()}
    warn_of_exposed_keys(config)
    check(plugins, config)
    if any(config.model == "demo" for config in configs.values()):
        with Doing("Fetching the demo", lambda: "", logging.getLogger(__name__).info):
            demo.fetched()
    app, gateway, models = create_gateway_of_models(config, configs, plugins)
    has_pages = bool(app.state.pages.links)
    on_demand = config.of(ModelsOptions).load_on_demand
    banner = banner_of_models(config, [*configs], url, on_demand=on_demand, has_pages=has_pages)
    with announced(url, ", ".join(configs)):
        connections = allowed_connections(server, THREADS.clock_ns, files_each=2)
        gateway.metrics.show(connections)
        run_until_signal(app, config, sock, connections, banner, on_drain=gateway.drain, failure=lambda: models.failure)
    if models.failure is None:
        return 0
    return 1


def serve_gateway(options: RouteOptions, sock: socket.socket, *, ignores_keys: bool = False) -> int:
    """Pass requests on to servers until a signal, and return the exit code. It warns if it `ignores_keys` that it was
    given for clients."""
    logs.configure(options.log_level, options.log_format)
    if ignores_keys:
        text = "--api-key and --api-key-file count only with --engine: the servers of --replica check keys themselves"
        logging.getLogger(__name__).warning(text)
    config = options.config
    app, gateway = create_gateway(options)
    url = address(config.server, sock.getsockname()[1])
    banner = banner_of_gateway(options, url, has_pages=bool(app.state.pages.links))
    with announced(url, f"those of {len(options.replica)} servers"):
        connections = allowed_connections(config.server, THREADS.clock_ns, files_each=2)
        gateway.metrics.show(connections)
        closed_by = SERVERS_KEYS_CLOSE if options.replica_key is None else None
        run_until_signal(app, config, sock, connections, banner, on_drain=gateway.drain, closed_by=closed_by)
    return 0


def banner_of_models(
    config: Config, names: Sequence[str], url: str, *, on_demand: bool, has_pages: bool = True
) -> Banner:
    when = "loaded when a request names it" if on_demand else "loading now"
    facts = {"Models": ", ".join(names), "Runs on": f"one process per model, {when}"}
    shown = places(config, url, "Chat", has_pages=has_pages)
    return Banner(f"oaiserve {__version__} serves {len(names)} models at {url}/v1", {**facts, **shown})


def banner_of_gateway(options: RouteOptions, url: str, *, has_pages: bool = True) -> Banner:
    if len(options.replica) > 1:
        number = f"{len(options.replica)} servers"
    else:
        number = "one server"
    opened_by = "--open-dashboard to open it for all"
    shown = places(options.config, url, "Page", has_pages=has_pages, opened_by=opened_by)
    facts = {"Servers": ", ".join(options.replica)} | shown
    closing = "The log reports when a server starts or stops taking requests. Ctrl-C stops the gateway."
    return Banner(f"oaiserve {__version__} routes to {number} at {url}/v1", facts, closing=closing)
