"""Attacks by how a request is sent: its frame, its connection, and how its client reads."""

from __future__ import annotations

import asyncio
from functools import partial

from tools.attack.attack import (
    ATTACKER_KEY,
    COMPLETIONS,
    ENDED,
    FULL,
    REFUSED,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
    request,
)
from tools.attack.wire import Answer, Connection, few_at_once

# -- HTTP whose frame does not end (tests/http has what is unclear, and may hide a request) ---------------------------

FRAMING = Family("framing", "gate and router disagree")
ENDLESS_BYTES = 64 << 20
BODY_SECONDS = 65.0  # A server ends a request within this time if its body does not come.
HEAD = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
    "content-type: application/json\r\n"
)
BODY = b'{"prompt": "Hi", "max_tokens": 1}'


def chunked(tail: bytes) -> bytes:
    return f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode() + tail


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return f"{len(data):x}".encode() + extension + b"\r\n" + data + b"\r\n"


@FRAMING.burst("chunks whose extensions do not end, 64 MiB", REFUSED | ENDED, 2, bare=True, answer_seconds=BODY_SECONDS,
               limit_seconds=80)  # fmt: skip
def chunk_extensions(number: Number) -> list[Sent]:
    """A chunk whose extension never ends is data that is no body: no limit on bodies sees it."""
    small_chunks = b"".join(chunk(b" ", b";" + b"x" * 1000) for _ in range(20_000))
    return [chunked(b"1;" + b"x" * ENDLESS_BYTES), chunked(small_chunks)]


@FRAMING.burst("trailers that do not end, 64 MiB", REFUSED | ENDED | outcomes(200), 2, bare=True,
               answer_seconds=BODY_SECONDS, limit_seconds=80)  # fmt: skip
def trailers(number: Number) -> list[Sent]:
    many = b"".join(b"x-%d: y\r\n" % i for i in range(1_000_000))
    return [chunked(chunk(BODY) + b"0\r\n" + each) for each in (b"x-trailer: " + b"x" * ENDLESS_BYTES, many)]


@FRAMING.attack("2,000 requests at once on one connection", outcomes(200), bare=True)
async def pipelining(strike: Strike) -> None:
    """All are answered in order, or the first of them and then a refusal."""
    ask = request("GET", "/v1/models", headers={"connection": "keep-alive"})
    number = strike.number(2000, 200)
    answers = await strike.exchange(ask * number, most_answers=number, quiet_seconds=5.0)
    good = sum(answer.status == 200 for answer in answers)
    is_refused = answers[-1].status == 400 and good == len(answers) - 1
    strike.check(good == number or is_refused, f"{good} of {number} pipelined requests were answered, and none refused")


# -- clients that ask and do not read, read slowly, or leave in the rudest way ----------------------------------------

READERS = Family("readers", "a client that takes all")


@READERS.attack("8 answers of many MB that nobody reads for 25 s", outcomes(200, 400, "cut", "reset", "closed") | FULL,
                answer_seconds=270, limit_seconds=330, is_work=True)  # fmt: skip
async def unread_answers(strike: Strike) -> None:
    """Answers of about 32 MB: 20 log-probabilities for each of 24,000 tokens of prompts. The client waits until one
    begins, reads nothing of it for a while, and then all: it comes whole, or the server has cut the connection."""
    number = strike.number(8, 2)
    held_seconds = strike.number(25, 5)
    prompts = [[7] * 4000] * strike.number(6, 1)
    body = post(COMPLETIONS, {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20, "n": 1})

    async def hold() -> None:
        strike.num_sent += 1
        connection = await strike.connect()
        await connection.send(body)
        if await connection.begins(strike.answer_seconds):
            await asyncio.sleep(held_seconds)
        strike.answers.append(await connection.answer(strike.answer_seconds))
        connection.close()

    await few_at_once([hold] * number, number)


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


# -- connections that cost the server something before they have asked for anything -----------------------------------

CONNECTIONS = Family("connections", "a client that takes all")
HEADER_BYTES = 64 << 20
HEAD_SECONDS = 65.0  # A server ends a connection within this time if its request does not come.
HELD_SECONDS = 80.0  # as above, counted from before 200 bodies are sent
CLIENT_HELLO = bytes.fromhex("16030100a5010000a10303")  # the beginning of one
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
NOT_ANSWERED = ENDED | outcomes(400, 408, 431)
NOT_SERVED = NOT_ANSWERED | outcomes(503)
endless = partial(CONNECTIONS.burst, at_once=1, bare=True)
unfinished = partial(CONNECTIONS.burst, answer_seconds=HEAD_SECONDS, limit_seconds=80, bare=True)


@endless("64 MiB in one header", NOT_ANSWERED, name="header-64mb")
def one_header(number: Number) -> list[Sent]:
    return [HEALTH + b"x-long: " + b"x" * HEADER_BYTES + b"\r\n\r\n"]


@endless("64 MiB in a million headers", NOT_ANSWERED, name="headers-64mb")
def many_headers(number: Number) -> list[Sent]:
    return [HEALTH + b"".join(b"x-%07d: %s\r\n" % (i, b"y" * 50) for i in range(HEADER_BYTES // 63)) + b"\r\n"]


@endless("64 MiB in the request's target", NOT_ANSWERED | outcomes(404, 414), name="target-64mb")
def long_target(number: Number) -> list[Sent]:
    return [b"GET /" + b"x" * HEADER_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"]


@unfinished("2,000 connections that send nothing", NOT_SERVED, at_once=2000)
def silent(number: Number) -> list[Sent]:
    return [b""] * number(2000, 200)


@unfinished("400 silent connections to a server with 256 files", NOT_SERVED | outcomes("refused"), at_once=400,
            server="few files")  # fmt: skip
def few_files(number: Number) -> list[Sent]:
    return [b""] * number(400, 40)


@CONNECTIONS.attack("500 handshakes that do not go on", NOT_ANSWERED | outcomes("not HTTP"), server="TLS", bare=True,
                    answer_seconds=HEAD_SECONDS, limit_seconds=80)  # fmt: skip
async def tls_unfinished(strike: Strike) -> None:
    """Begin a handshake over plain TCP, on a port that speaks TLS."""
    strike.url = strike.url.replace("https:", "http:")
    await strike.ask_all([CLIENT_HELLO] * strike.number(500, 50), 500)


def record(kind: int, data: bytes) -> bytes:
    """Return a record of TLS 1.2, of any kind and content."""
    return bytes([kind, 3, 3]) + len(data).to_bytes(2, "big") + data


@CONNECTIONS.attack("HTTP, endless hellos, alerts and handshakes in pieces, to a port that speaks TLS",
                    NOT_ANSWERED | outcomes("not HTTP"), server="TLS", bare=True, answer_seconds=HEAD_SECONDS,
                    limit_seconds=120)  # fmt: skip
async def tls_strange(strike: Strike) -> None:
    address = strike.url
    strike.url = address.replace("https:", "http:")
    hello = b"\x01" + (2**24 - 1).to_bytes(3, "big")  # the greatest length that can be announced
    forms: tuple[Sent, ...] = (
        HEALTH + b"\r\n", record(22, hello) + record(22, b"x" * 2**14) * 4096, record(22, b"") * 200_000,
        record(21, b"\1\0") * 200_000, record(23, b"x" * 2**14) * 4096, record(20, b"\1") * 200_000,
        b"\x80\x2e\1\0\2" + b"x" * 2**20, record(22, CLIENT_HELLO[5:]) * 1000, dribble(CLIENT_HELLO, b"x" * 60),
    )  # fmt: skip
    await strike.ask_all(forms * strike.number(20, 2), 40)
    strike.url = address
    answers = await strike.exchange(HEALTH + b"connection: close\r\n\r\n")
    strike.check(answers[0].status == 200, f"afterwards a handshake and a request got {answers[0].outcome}")
    strike.answers.pop()
    strike.num_sent -= 1


def dribble(begin: bytes, then: bytes) -> Sent:
    async def send(connection: Connection) -> None:
        await connection.send(begin)
        for byte in then:
            await asyncio.sleep(1)
            await connection.send(bytes([byte]))

    return send


@unfinished("200 heads, a byte a second", NOT_ANSWERED, at_once=200)
def dribbled_headers(number: Number) -> list[Sent]:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nauthorization: Bearer {ATTACKER_KEY}\r\nx-slow: ".encode()
    return [dribble(head, b"x" * 1000)] * number(200, 20)


@unfinished("200 bodies, a byte a second", NOT_ANSWERED, at_once=200)
def dribbled_bodies(number: Number) -> list[Sent]:
    return [dribble(post(COMPLETIONS, headers={"content-length": "100000"}), b" " * 1000)] * number(200, 20)


@CONNECTIONS.burst("200 bodies of 8 MB without their last bytes", NOT_ANSWERED | outcomes(429), 200,
                   answer_seconds=HELD_SECONDS, limit_seconds=90)  # fmt: skip
def held_bodies(number: Number) -> list[Sent]:
    """Bodies of 8 MB without their last bytes: the received part waits in memory."""
    length = 8 * 2**20 - 1024
    return [post(COMPLETIONS, headers={"content-length": f"{length}"}) + b" " * (length - 1024)] * number(200, 20)
