"""Serves as a gateway in front of servers elsewhere, until a signal."""

from __future__ import annotations

import logging
import socket

from oaiserve import __version__
from oaiserve.commands.banner import Banner, address, places
from oaiserve.commands.listening import run_until_signal
from oaiserve.commands.servers import announced
from oaiserve.http.connections import allowed_connections
from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.runtime import THREADS
from oaiserve.telemetry import logs

# How to close a gateway, which has no keys of its own.
SERVERS_KEYS_CLOSE = (
    "If the servers behind it require keys, set OAISERVE_REPLICA_KEY (--replica-key) to one of them. Otherwise start "
    "them with --api-key, or set --host 127.0.0.1 here to answer this machine only."
)


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
