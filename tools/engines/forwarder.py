"""The least that a proxy on this event loop can do: python -m tools.engines.forwarder --to 8000 --port 9000

It passes the bytes of each connection on in both directions. With --parsed, it reads answers with the parser that the
gateway uses, and writes each part of a body as a chunk of its own. It keeps no account.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import cast

import httptools
import uvloop

HOST = "127.0.0.1"


class FromEngine(asyncio.Protocol):
    """A connection to the engine, for one connection of a client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self.client = client

    def data_received(self, data: bytes) -> None:
        self.client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.client.close()


class ParsedFromEngine(FromEngine):
    """Writes answers with chunks, whatever form the engine gives them."""

    def __init__(self, client: asyncio.Transport) -> None:
        super().__init__(client)
        self._parser = httptools.HttpResponseParser(self)
        self._head: list[bytes] = []
        self._parts: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._parts:
            self.client.write(b"".join(self._parts))
            self._parts.clear()

    # -- callbacks of the parser --------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in (b"content-length", b"transfer-encoding"):
            self._head.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        status = b"HTTP/1.1 %d \r\n" % self._parser.get_status_code()
        self._parts += [status, *self._head, b"transfer-encoding: chunked\r\n\r\n"]
        self._head.clear()

    def on_body(self, body: bytes) -> None:
        self._parts.append(b"%x\r\n%b\r\n" % (len(body), body))

    def on_message_complete(self) -> None:
        self._parts.append(b"0\r\n\r\n")


class FromClient(asyncio.Protocol):
    """A client's connection, whose bytes wait until there is one to the engine."""

    _to_engine: asyncio.Transport | None = None

    def __init__(self, port: int, make: Callable[[asyncio.Transport], FromEngine]) -> None:
        self._port = port
        self._make = make
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connecting = asyncio.ensure_future(self._connect(cast(asyncio.Transport, transport)))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._to_engine, _ = await loop.create_connection(lambda: self._make(client), HOST, self._port)
        except OSError:
            client.close()
        else:
            self._to_engine.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self._to_engine is None:
            self._early += data
        else:
            self._to_engine.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connecting.cancel()
        if self._to_engine is not None:
            self._to_engine.close()


async def forward(port: int, make: Callable[[], FromClient]) -> None:
    """Serve on a port with protocols that `make` makes."""
    server = await asyncio.get_running_loop().create_server(make, HOST, port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=int, required=True, help="the port of the engine")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parsed", action="store_true", help="read and write HTTP, in place of bytes")
    arguments = parser.parse_args()
    make = ParsedFromEngine if arguments.parsed else FromEngine
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forward(arguments.port, lambda: FromClient(arguments.to, make)))


if __name__ == "__main__":
    main()
