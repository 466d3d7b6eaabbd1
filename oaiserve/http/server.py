"""uvicorn with our own listener and an orderly shutdown, which waits for running requests and then cuts them off.

This module knows neither the engine nor the API. It gets callables that report a failure, and one that it calls at the
shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from oaiserve.config import ServerOptions
from oaiserve.errors import InvalidRequest, Unavailable
from oaiserve.http.connection import Connection, closing_answer
from oaiserve.http.connections import Connections, Refusal
from oaiserve.http.listener import MOST_AT_ONCE, Listener, send_last, speaks_http
from oaiserve.http.proxies import TrustedProxies
from oaiserve.http.uvicorn_parts import STARTUP_FAILURE

log = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # time in which clients can read the error when the shutdown cuts them off
POLL_SECONDS = 0.02
TLS_GOODBYE_SECONDS = 5.0  # time in which a client must answer the end of TLS before its connection is cut
RETRY_AFTER_SECONDS = 5  # sent to clients whose connection exceeds a limit
HEADERS = [("x-content-type-options", "nosniff")]  # Every answer has this, so that browsers don't guess its type.


class Server(uvicorn.Server):
    """A uvicorn server that serves until a signal arrives or `failure()` returns an exception.

    `on_drain` is called when the shutdown begins, maybe from a signal handler, and maybe more than once.
    """

    most_accepted_at_once = MOST_AT_ONCE

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        connections: Connections,
        *,
        on_drain: Callable[[], None] = lambda: None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            TrustedProxies(app, options.trusted_proxy),
            loop="uvloop",
            http=Connection,
            headers=HEADERS,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
        )
        super().__init__(config)
        self.connections = connections
        self._options = options
        self._listeners: list[Listener] = []
        self._tls_options: dict[str, Any] = {}
        self._beginning: set[asyncio.Task[None]] = set()  # connections during their handshake
        self._is_closed = False
        self._has_warned_of_http = False
        self._on_drain = on_drain
        self._failure = failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first begins the shutdown, the second skips the wait for running requests.

        The third ends the process at once, without waiting for the engine's step and for telemetry.
        """
        if self.force_exit:
            os._exit(1)
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.started:
            self._on_drain()

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Start the app, then accept connections. This replaces uvicorn's method, which doesn't limit them."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        tls = self.config.ssl
        if tls:
            self._tls_options = {
                "ssl": tls,
                "ssl_handshake_timeout": self._options.header_timeout_seconds,
                "ssl_shutdown_timeout": TLS_GOODBYE_SECONDS,
            }
        refusal = None if tls else lambda: too_many_connections(self.server_state.default_headers)
        for sock in sockets or ():
            most = self.most_accepted_at_once
            self._listeners.append(Listener(sock, self.connections, self._begin, refusal=refusal, most_at_once=most))
        self.started = True

    def _begin(self, client: socket.socket, address: str) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(client, address))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, client: socket.socket, address: str) -> None:
        is_lost = False

        def on_lost() -> None:
            nonlocal is_lost
            if not is_lost:
                is_lost = True
                self.connections.release(address)

        connection = Connection(
            self.config,
            self.server_state,
            self.lifespan.state,
            options=self._options,
            clock_ns=self.connections.clock_ns,
            count=self.connections.count,
            charge=self.connections.refusals.charge,
            on_lost=on_lost,
        )
        loop = asyncio.get_running_loop()
        try:
            if self.config.ssl and await speaks_http(client, self._options.header_timeout_seconds):
                self._refuse_http(client, address)
            transport, _ = await loop.connect_accepted_socket(lambda: connection, client, **self._tls_options)
        except OSError as error:  # This includes ssl.SSLError.
            log.debug("A connection has failed before its first request: %s", error)
            client.close()
            self.connections.count(Refusal.HANDSHAKE)
            on_lost()
        else:
            if self._is_closed:
                transport.close()

    def _refuse_http(self, client: socket.socket, address: str) -> None:
        """Answer a client that speaks HTTP without TLS in plain HTTP, and raise OSError."""
        error = InvalidRequest("This port speaks HTTPS. Begin the URL with https://.")
        send_last(client, closing_answer(error, self.server_state.default_headers))
        if not self._has_warned_of_http:
            self._has_warned_of_http = True
            log.warning("%s sent HTTP to this port, which speaks HTTPS: its URL must begin with https://", address)
        raise ConnectionAbortedError("it speaks HTTP without TLS")

    async def on_tick(self, counter: int) -> bool:
        """End the server if there is a failure. uvicorn calls this ten times a second."""
        failure = self._failure()
        if failure is not None:
            log.error("The engine has stopped (%s: %s), so the server ends", type(failure).__name__, failure)
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_drain()
        for listener in self._listeners:
            listener.close()
        self._is_closed = True
        for sock in sockets or ():
            sock.close()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()  # An idle connection closes now, others after their answer.
        running = {connection for connection in connections if not connection.transport.is_closing()}
        log_shutdown(len(running), self._options.drain_timeout_seconds)
        await self._wait_until_idle(self._options.drain_timeout_seconds, may_skip=True)
        cut = running & connections
        for task in self.server_state.tasks:
            task.cancel()
        await self._wait_until_idle(CUT_SECONDS)
        for connection in list(connections):
            connection.transport.abort()
        log_end(len(running - cut), len(cut))
        await self.lifespan.shutdown()

    async def _wait_until_idle(self, timeout_seconds: float, *, may_skip: bool = False) -> None:
        """Wait until all answers are written and read, or until the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while (self.server_state.tasks or self.server_state.connections) and loop.time() < deadline:
            if may_skip and self.force_exit:
                return
            await asyncio.sleep(POLL_SECONDS)


def log_shutdown(num_running: int, limit_seconds: int) -> None:
    if num_running:
        log.info("Shutting down. Running requests: %d, with up to %d s to finish", num_running, limit_seconds)
    else:
        log.info("Shutting down. No request is running")


def log_end(num_finished: int, num_cut_off: int) -> None:
    if num_finished or num_cut_off:
        log.info("Shut down. Requests finished: %d, cut off: %d", num_finished, num_cut_off)


def too_many_connections(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    error = Unavailable(
        "The server has too many open connections. Please try again later, and reuse connections.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )
    return closing_answer(error, headers)
