"""Requests to a replica that falls silent."""

import asyncio

import pytest

from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.upstream import Unreachable, Upstream

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Replica:
    """Answers the first request, and holds the others."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.held = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        await reader.readuntil(b"\r\n\r\n")
        self.held.set()


async def test_request_to_an_abandoned_replica_is_not_sent_there_again() -> None:
    replica = Replica()
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    upstream = Upstream(Address("127.0.0.1", server.sockets[0].getsockname()[1], "a"), 1)
    assert await upstream.get(b"/") == (200, b"")
    waiting = asyncio.create_task(upstream.get(b"/"))  # on the same connection
    await replica.held.wait()

    upstream.abandon()

    with pytest.raises(Unreachable):
        await waiting
    assert len(replica.writers) == 1
    upstream.close()
    server.close()
    for writer in replica.writers:
        writer.close()
        await writer.wait_closed()


async def test_parts_are_taken_as_they_come_until_one_is_refused() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = Upstream(Address("127.0.0.1", server.sockets[0].getsockname()[1], "a"), 1)
    answer = await upstream.ask("GET", b"/")
    taken: list[bytes] = []

    def take(part: bytes) -> bool:
        if part == b"bad":
            raise ValueError(part)
        if part == b"no":
            return False
        taken.append(part)
        writers[0].write(NEXT[part])
        return True

    writers[0].write(b"1\r\na\r\n")
    assert await answer.read(take) == b"no"
    assert taken == [b"a", b"bc"], "chunks that come together are one part"
    writers[0].write(b"3\r\nbad\r\n")
    with pytest.raises(ValueError, match="bad"):
        await answer.read(take)
    writers[0].write(b"1\r\nd\r\n0\r\n\r\n")
    assert await answer.read() == b"d"
    assert await answer.read(take) == b""
    upstream.close()
    server.close()
    writers[0].close()
    await writers[0].wait_closed()


NEXT = {b"a": b"1\r\nb\r\n1\r\nc\r\n", b"bc": b"2\r\nno\r\n"}
