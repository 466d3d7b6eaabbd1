"""Serves as a gateway in front of foreign engines until a signal."""

from __future__ import annotations

import socket

from oaiserve import __version__
from oaiserve.commands.banner import Banner, address, places
from oaiserve.commands.file_checks import warn_of_exposed_keys
from oaiserve.commands.listening import page_of_request, run_until_signal
from oaiserve.commands.servers import announced
from oaiserve.http.connections import allowed_connections
from oaiserve.plugins.gateway.engines.app import create_engine_gateway
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions
from oaiserve.runtime import THREADS
from oaiserve.telemetry import logs


def serve_engines(options: RouteOptions, engines: EnginesOptions, sock: socket.socket) -> int:
    """Pass requests on to engines until a signal, and return the exit code. Raises StartupError."""
    config = engines.config_of(options, "engines")
    url = address(config.server, sock.getsockname()[1])
    log_limit = logs.configure(
        options.log_level,
        options.log_format,
        address_of=lambda request_id: page_of_request(app.state.pages, url, request_id),
    )
    warn_of_exposed_keys(config)
    connections = allowed_connections(config.server, THREADS.clock_ns, files_each=2)
    app, fleet = create_engine_gateway(options, engines, connections=connections, log_limit=log_limit)
    facts = {"Engines": ", ".join(engines.engine)}
    facts |= places(config, url, "Page", has_pages=bool(app.state.pages.links))
    closing = "The log says what the engines are. Ctrl-C stops the gateway."
    banner = Banner(f"oaiserve {__version__} accounts for other engines at {url}/v1", facts, closing=closing)
    with announced(url, f"those of {len(engines.engine)} engines"):
        run_until_signal(app, config, sock, connections, banner, on_drain=fleet.drain)
    return 0
