"""uvicorn with a write timeout and an orderly shutdown: it waits for running requests, cuts off the rest and logs both.

This module knows neither the engine nor the API. Callables report a failure to it and learn of the shutdown from it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oaiserve.config import ServerOptions
from oaiserve.routes.respond import WRITE_TIMED_OUT

log = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # the time that clients have to read the error when the shutdown cuts them off
POLL_SECONDS = 0.02


class Connection(HttpToolsProtocol):
    """A connection that is cut when its client reads nothing for `write_timeout_seconds` while data waits. 0: never."""

    def __init__(self, *args: Any, write_timeout_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timeout_seconds = write_timeout_seconds
        self._write_timer: asyncio.TimerHandle | None = None
        self._extensions: dict[str, dict[object, object]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as the kernel accepts no more data, and resumes when it has accepted all. So a pause
        # lasts as long as the client does not read, and little more than one piece of a body is ever buffered.
        transport.set_write_buffer_limits(high=1, low=0)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timeout_seconds:
            self._write_timer = self.loop.call_later(self._write_timeout_seconds, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        super().connection_lost(exc)

    def _cut(self) -> None:
        """Cut the connection by `abort`. `close` would wait until the client has read the buffered data."""
        self._extensions[WRITE_TIMED_OUT] = {}
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class Server(uvicorn.Server):
    """A uvicorn server that serves until a signal arrives or `failure()` returns an exception.

    `on_drain` is called when the shutdown begins. The call may come from a signal handler, and more than once.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        options: ServerOptions,
        *,
        on_drain: Callable[[], None] = lambda: None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=partial(Connection, write_timeout_seconds=options.write_timeout_seconds),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=options.tls_certificate,
            ssl_keyfile=options.tls_key,
        )
        super().__init__(config)
        self._drain_timeout_seconds = options.drain_timeout_seconds
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

    async def on_tick(self, counter: int) -> bool:
        """End the server if there is a failure. uvicorn calls this ten times a second."""
        failure = self._failure()
        if failure is not None:
            log.error("The engine has stopped (%s: %s), so the server ends", type(failure).__name__, failure)
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_drain()
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()  # an idle connection closes now, any other after its answer
        running = {connection for connection in connections if not connection.transport.is_closing()}
        log.info("Shutting down. Requests running: %d, given %d s", len(running), self._drain_timeout_seconds)
        await self._wait_until_idle(self._drain_timeout_seconds, may_skip=True)
        cut = running & connections
        for task in self.server_state.tasks:
            task.cancel()
        await self._wait_until_idle(CUT_SECONDS)
        for connection in list(connections):
            connection.transport.abort()
        log.info("Shutting down. Requests finished: %d, cut off: %d", len(running - cut), len(cut))
        await self.lifespan.shutdown()

    async def _wait_until_idle(self, timeout_seconds: float, *, may_skip: bool = False) -> None:
        """Wait until all answers are written and read, or until the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while (self.server_state.tasks or self.server_state.connections) and loop.time() < deadline:
            if may_skip and self.force_exit:
                return
            await asyncio.sleep(POLL_SECONDS)
