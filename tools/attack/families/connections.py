"""Connections that cost the server something before they have asked for anything."""

from __future__ import annotations

import asyncio
from functools import partial

from tools.attack.attack import ATTACKER_KEY, COMPLETIONS, ENDED, Number, Sent, Strike, attack, burst, outcomes, post
from tools.attack.wire import Connection

HEADER_BYTES = 64 << 20
HEAD_SECONDS = 65.0  # in which a server ends a connection whose request does not come
HELD_SECONDS = 80.0  # as above, counted from before 200 bodies are sent
CLIENT_HELLO = bytes.fromhex("16030100a5010000a10303")  # the beginning of one
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
NOT_ANSWERED = ENDED | outcomes(400, 408, 431)
NOT_SERVED = NOT_ANSWERED | outcomes(503)
without_end = partial(burst, answer_seconds=HEAD_SECONDS, limit_seconds=80, bare=True)


@burst("64 MiB in one header", NOT_ANSWERED, 1, name="header-64mb", bare=True)
def one_header(number: Number) -> list[Sent]:
    return [HEALTH + b"x-long: " + b"x" * HEADER_BYTES + b"\r\n\r\n"]


@burst("64 MiB in a million headers", NOT_ANSWERED, 1, name="headers-64mb", bare=True)
def many_headers(number: Number) -> list[Sent]:
    return [HEALTH + b"".join(b"x-%07d: %s\r\n" % (i, b"y" * 50) for i in range(HEADER_BYTES // 63)) + b"\r\n"]


@burst("64 MiB in the request's target", NOT_ANSWERED | outcomes(404, 414), 1, name="target-64mb", bare=True)
def long_target(number: Number) -> list[Sent]:
    return [b"GET /" + b"x" * HEADER_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"]


@without_end("2,000 connections that send nothing", NOT_SERVED, at_once=2000)
def silent(number: Number) -> list[Sent]:
    return [b""] * number(2000, 200)


@without_end("400 silent connections to a server with 256 files", NOT_SERVED | outcomes("refused"), at_once=400,
             server="few files")  # fmt: skip
def few_files(number: Number) -> list[Sent]:
    return [b""] * number(400, 40)


@attack("500 handshakes that do not go on", NOT_ANSWERED | outcomes("not HTTP"), server="TLS", bare=True,
        answer_seconds=HEAD_SECONDS, limit_seconds=80)  # fmt: skip
async def tls_unfinished(strike: Strike) -> None:
    """Begin a handshake over plain TCP, on a port that speaks TLS."""
    strike.url = strike.url.replace("https:", "http:")
    await strike.ask_all([CLIENT_HELLO] * strike.number(500, 50), 500)


def dribble(begin: bytes, then: bytes) -> Sent:
    async def send(connection: Connection) -> None:
        await connection.send(begin)
        for byte in then:
            await asyncio.sleep(1)
            await connection.send(bytes([byte]))

    return send


@without_end("200 heads, a byte a second", NOT_ANSWERED, at_once=200)
def dribbled_headers(number: Number) -> list[Sent]:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ATTACKER_KEY}\r\nx-slow: ".encode()
    return [dribble(head, b"x" * 1000)] * number(200, 20)


@without_end("200 bodies, a byte a second", NOT_ANSWERED, at_once=200)
def dribbled_bodies(number: Number) -> list[Sent]:
    return [dribble(post(COMPLETIONS, headers={"content-length": "100000"}), b" " * 1000)] * number(200, 20)


@burst("200 bodies of 8 MB without their last bytes", NOT_ANSWERED | outcomes(429), 200,
          answer_seconds=HELD_SECONDS, limit_seconds=90)  # fmt: skip
def held_bodies(number: Number) -> list[Sent]:
    """Bodies of 8 MB that come but for the last bytes: what was received waits in memory."""
    length = 8 * 2**20 - 1024
    return [post(COMPLETIONS, headers={"content-length": f"{length}"}) + b" " * (length - 1024)] * number(200, 20)
