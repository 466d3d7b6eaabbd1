"""`Tap` passes bytes between a gateway and an engine, and keeps the bodies of the engine's answers, so that they can be
compared with what clients got."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread

import httptools

from tools.engines.forwarder import HOST, FromClient, FromEngine, forward
from tools.server_process import free_port


class Tap:
    """The bodies of answers by the ids of their requests. An answer is there before the gateway gets its end."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.bodies: dict[str, bytes] = {}


class TappedEngine(FromEngine):
    """Reads answers on their way."""

    def __init__(self, client: asyncio.Transport, tap: Tap, asked: TappedClient) -> None:
        super().__init__(client)
        self._tap = tap
        self._asked = asked
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        super().data_received(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._tap.bodies[self._asked.request_id] = self._body
        self._body = b""


class TappedClient(FromClient):
    """Reads the ids of requests. A connection has one request at a time."""

    request_id = ""

    def __init__(self, port: int, tap: Tap) -> None:
        super().__init__(port, partial(TappedEngine, tap=tap, asked=self))
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self.request_id = ""  # The gateway's own questions have none.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.request_id = value.decode()


@contextmanager
def running_tap(engine_port: int) -> Iterator[Tap]:
    """Run a tap in front of an engine, in a thread."""
    tap = Tap()
    loop = asyncio.new_event_loop()
    serving = loop.create_task(forward(tap.port, partial(TappedClient, engine_port, tap)))
    thread = Thread(target=lambda: loop.run_until_complete(asyncio.wait({serving})), name="tap")
    thread.start()
    try:
        yield tap
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
