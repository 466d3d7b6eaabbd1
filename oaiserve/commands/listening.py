"""Binds a port and serves on it until a signal arrives, for model servers and gateways alike."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from oaiserve.commands.addresses import allowed_hosts, cannot_listen
from oaiserve.commands.banner import Banner
from oaiserve.commands.exposure import A_KEY_CLOSES, warn_if_open
from oaiserve.commands.file_checks import refused_certificate
from oaiserve.config import Config
from oaiserve.errors import StartupError
from oaiserve.http.connections import Connections
from oaiserve.screen import Screen

if TYPE_CHECKING:
    from oaiserve.http.server import Server
    from oaiserve.routes.pages import Pages

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the system keeps until they are accepted


def obey_signals_as_first_process() -> None:
    """Let SIGTERM and SIGHUP end the first process of a container until the server handles them. The kernel drops
    signals that this process doesn't handle, so a container would stop only when it is killed."""
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, leave)


def end_at_once_on_interrupt() -> None:
    """Let Ctrl-C end the process at once from now on, unless it is ignored.

    A KeyboardInterrupt could be raised in a callback that swallows it, as happens while libraries are imported. It
    would also shut the interpreter down while other threads run native code."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave if os.getpid() == 1 else signal.SIG_DFL)


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once in the `with` block."""
    before = signal.getsignal(signal.SIGINT)
    end_at_once_on_interrupt()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)  # the exit code that shells report; an exception could be ignored


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket before the model loads, so that a busy port is reported early. It does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded for a DNS query
        reason = error.strerror if isinstance(error, OSError) else "not a valid name"
        raise StartupError(
            f"--host is '{host}', which is not an address of this machine: {reason}. {allowed_hosts()}"
        ) from error
    try:
        # Allow binding a port that another server has just closed.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, error) from error
    return sock


def run_until_signal(
    app: Callable[..., Awaitable[None]],
    config: Config,
    sock: socket.socket,
    connections: Connections,
    banner: Banner | Callable[[], None],
    *,
    on_drain: Callable[[], None] = lambda: None,
    failure: Callable[[], BaseException | None] = lambda: None,
    closed_by: str | None = A_KEY_CLOSES,
    kind: Callable[..., Server] | None = None,
) -> None:
    """Serve `app` until SIGTERM, SIGINT, SIGHUP or a failure. `kind` is the class of the server, by default `Server`.
    Raises SystemExit if it cannot serve.

    If everyone in the network can use the server, a warning with the advice `closed_by` is logged. None means that
    another server in front of this one requires the keys.
    """
    from oaiserve.http.server import Server

    server = (kind or Server)(app, config.server, connections, on_drain=on_drain, failure=failure)
    # uvicorn restores these handlers when it has stopped. A further signal must then not kill the process, because the
    # exit code would no longer be 0.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` relies on this.
            signal.signal(number, server.handle_exit)
    listen(config, sock, banner)
    if closed_by is not None:
        warn_if_open(config, sock, closed_by)
    server.run(sockets=[sock])


def listen(config: Config, sock: socket.socket, banner: Banner | Callable[[], None]) -> None:
    """Listen, then print the banner, log it as JSON, or call `banner` if it is a function. Raises StartupError if
    another process listens on the port."""
    from oaiserve.telemetry.logs import resolved

    options = config.server
    if options.open_dashboard and not config.is_private:
        logger.warning(
            "--open-dashboard lets everyone who can reach %s see all requests, but not their text", options.host
        )
    if options.tls_certificate is not None and options.tls_key is not None:
        reason = refused_certificate(options.tls_certificate, options.tls_key)
        if reason is not None:
            logger.warning("Clients will refuse --tls-certificate '%s': %s.", options.tls_certificate, reason)
    try:
        sock.listen(BACKLOG)
    except OSError as error:  # Another process listens on the same port.
        raise cannot_listen(options.host, options.port, error) from error
    if not isinstance(banner, Banner):
        banner()
    elif resolved(options.log_format) == "json":
        logger.info("%s", banner.title, extra={"start": dict(banner.facts)})
    else:
        print(banner.text(Screen.of(sys.stderr)), file=sys.stderr, flush=True)


def page_of_request(pages: Pages, url: str, request_id: str) -> str | None:
    """Return the address of the page of a request, or None if the server has no such page."""
    return f"{url}/{pages.request}{request_id}" if pages.request else None
