"""`Tap` passes bytes between a gateway and an engine, and keeps the bodies of the engine's answers, so that they can be
compared with what clients got."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import httptools

from tools.server_process import free_port

HOST = "127.0.0.1"
READ_BYTES = 2**16
Parser = httptools.HttpRequestParser | httptools.HttpResponseParser


class Tap:
    """The bodies of answers by the ids of their requests. An answer is there before the gateway gets its end."""

    def __init__(self, engine_port: int) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.bodies: dict[str, bytes] = {}
        self._engine_port = engine_port

    async def serve(self) -> None:
        server = await asyncio.start_server(self._pass_on, HOST, self.port)
        await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a connection of the gateway with the engine, until one of both ends it."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_engine, to_engine = await asyncio.open_connection(HOST, self._engine_port)
            with contextlib.closing(to_engine):
                request = Asked()
                asked = copied(reader, to_engine, httptools.HttpRequestParser(request))
                answered = copied(from_engine, writer, httptools.HttpResponseParser(Answered(self, request)))
                copies = [asyncio.ensure_future(each) for each in (asked, answered)]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for each in copies:
                    each.cancel()


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parser: Parser) -> None:
    """Write what is read, after the parser has seen it."""
    while data := await reader.read(READ_BYTES):
        parser.feed_data(data)
        writer.write(data)


class Asked:
    """The id of the request that a connection has at a time. The gateway's own questions have none."""

    id = ""

    def on_message_begin(self) -> None:
        self.id = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.id = value.decode()


class Answered:
    """Keeps the bodies of a connection's answers."""

    def __init__(self, tap: Tap, request: Asked) -> None:
        self._tap = tap
        self._request = request
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._tap.bodies[self._request.id] = self._body
        self._body = b""


@contextmanager
def running_tap(engine_port: int) -> Iterator[Tap]:
    """Run a tap in front of an engine, in a thread."""
    tap = Tap(engine_port)
    loop = asyncio.new_event_loop()
    serving = loop.create_task(tap.serve())
    thread = Thread(target=lambda: loop.run_until_complete(asyncio.wait({serving})), name="tap")
    thread.start()
    try:
        yield tap
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
