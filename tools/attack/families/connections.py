"""Attacks by how a request is sent: its connection, and how its client reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from functools import partial

from tools.attack.attack import (
    COMPLETIONS,
    ENDED,
    FULL,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
    request,
)
from tools.attack.wire import Answer, Connection, few_at_once

# -- clients that ask and do not read, read slowly, or leave in the rudest way ----------------------------------------

READERS = Family("readers", "a client that takes all")


@READERS.attack("40 streams, read one byte a second", outcomes(200), limit_seconds=90, is_work=True)
async def slow_streams(strike: Strike) -> None:
    """Streams that are read one byte a second, for a while. They must be neither lost nor waited for."""
    body = post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 50, "ignore_eos": True, "stream": True})

    async def read_slowly() -> None:
        strike.num_sent += 1
        connection = await strike.connect()
        await connection.send(body)
        for _ in range(strike.number(20, 3)):
            await connection.reader.readexactly(1)
            await asyncio.sleep(1)
        connection.close(reset=True)
        strike.answers.append(Answer("200"))  # it was being answered

    number = strike.number(40, 8)
    await few_at_once([read_slowly] * number, number)


@READERS.attack("1,000 requests whose connections are reset at once", outcomes(200, "left"), is_work=True)
async def resets(strike: Strike) -> None:
    body = {"prompt": "Tell me of the sea.", "max_tokens": 500, "ignore_eos": True, "stream": True}
    await strike.leave_all([post(COMPLETIONS, body)] * strike.number(1000, 100), 50, after_seconds=0.01)
    answer = await strike.ask(post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}))
    strike.check(answer.status == 200, f"afterwards a request got {answer.outcome}")


@READERS.burst("100 clients that close their side after asking", outcomes(200) | ENDED | FULL, 20, is_work=True)
def half_closed(number: Number) -> list[Sent]:
    """A client that shuts down its side of the connection after its request may still read: it gets an answer, or the
    server ends the connection."""

    async def send(connection: Connection) -> None:
        await connection.send(post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 4}))
        connection.writer.write_eof()

    return [send] * number(100, 20)


HOSTILE = (b'"x":1', b" " * 2**21 + b'"x":1', b",".join(b'"%x":1' % number for number in range(2**17)))
UPGRADE = {
    "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
    "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
}  # fmt: skip
EMPTY_PING = b"\x89\x80" + bytes(4)


@READERS.attack("100 sockets with long messages, frames without requests and pings, which are left",
                outcomes("left"), is_work=True, limit_seconds=180)  # fmt: skip
async def sockets(strike: Strike) -> None:
    async def speak(number: int) -> None:
        strike.num_sent += 1
        strike.answers.append(Answer("left"))
        connection = await strike.connect()
        with contextlib.suppress(OSError):  # The server may close it.
            await connection.send(request("GET", "/v1/responses", headers=UPGRADE))
            for turn in range(1 + number % 7):
                fields = {"type": "response.create", "input": "Hi", "store": False, "max_output_tokens": 16}
                message = json.dumps(fields | {"stream_id": "ab"[turn % 2]}).encode()
                message = b"{%b,%b" % (HOSTILE[number % len(HOSTILE)], message[1:])
                await connection.send(framed(message) + framed(b"{}") * 20 + EMPTY_PING * 100)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await connection.reader.read(2**16)
        connection.close(reset=number % 2 == 0)

    await few_at_once([partial(speak, number) for number in range(strike.number(100, 14))], 6)


def framed(message: bytes) -> bytes:
    """Return a whole message in one frame, whose mask changes nothing."""
    return b"\x81\xff" + struct.pack(">Q", len(message)) + bytes(4) + message


# -- connections that cost the server something before they have asked for anything -----------------------------------

# tests/http has requests without an end, of each kind.
CONNECTIONS = Family("connections", "a client that takes all")
HEAD_SECONDS = 65.0  # A server ends a connection within this time if its request does not come.
HELD_SECONDS = 80.0  # as above, counted from before 200 bodies are sent
NOT_ANSWERED = ENDED | outcomes(400, 408, 431)


@CONNECTIONS.burst("2,000 connections that send nothing", NOT_ANSWERED | outcomes(503), at_once=2000,
                   answer_seconds=HEAD_SECONDS, limit_seconds=80, bare=True)  # fmt: skip
def silent(number: Number) -> list[Sent]:
    return [b""] * number(2000, 200)


@CONNECTIONS.burst("200 bodies of 8 MB without their last bytes", NOT_ANSWERED | outcomes(429), 200,
                   answer_seconds=HELD_SECONDS, limit_seconds=90)  # fmt: skip
def held_bodies(number: Number) -> list[Sent]:
    """Bodies of 8 MB without their last bytes: the received part waits in memory."""
    length = 8 * 2**20 - 1024
    return [post(COMPLETIONS, headers={"content-length": f"{length}"}) + b" " * (length - 1024)] * number(200, 20)
