"""HTTP whose frame is unclear: a request may hide within another one, or never end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from tools.attack.attack import (
    ATTACKER_KEY,
    COMPLETIONS,
    ENDED,
    REFUSED,
    Number,
    Sent,
    Strike,
    attack,
    burst,
    outcomes,
    post,
    request,
)
from tools.attack.wire import Connection, few_at_once

HIDDEN_ID = "hidden-request"  # each gets one of its own, as long as this
AT_ONCE = 8
ENDLESS_BYTES = 64 << 20
BODY_SECONDS = 65.0  # in which a server ends a request whose body does not come
HEAD = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
    "content-type: application/json\r\n"
)
PAUSE_SECONDS = 0.2
BODY = b'{"prompt": "Hi", "max_tokens": 1}'
HIDDEN = post(COMPLETIONS, BODY, {"x-request-id": HIDDEN_ID})  # it must never be answered


async def send_all(strike: Strike, requests: Mapping[str, bytes]) -> None:
    """Send each, at once and in two parts, and check that none of the requests hidden in them was understood as one."""
    cases = [(name, data, in_two) for name, data in requests.items() for in_two in (False, True)]
    ids = {f"hidden-{number:07}": case for number, case in enumerate(cases)}
    await few_at_once([partial(send, strike, hidden_id, *case) for hidden_id, case in ids.items()], AT_ONCE)
    await asyncio.sleep(1)  # the log comes a moment after the answer
    log, answered = strike.log, {answer.headers.get("x-request-id") for answer in strike.answers}
    for hidden_id, (name, _, in_two) in ids.items():
        was_run = hidden_id.encode() in log or hidden_id in answered
        strike.check(not was_run, f"{name}{', in two parts' * in_two}: the hidden request was run")


async def send(strike: Strike, hidden_id: str, name: str, data: bytes, in_two: bool) -> None:
    """Send the bytes; with `in_two` the head first, and the rest a moment later, as the network may cut them."""

    async def head_first(connection: Connection) -> None:
        head, end, rest = data.partition(b"\r\n\r\n")
        await connection.send(head + end)
        await asyncio.sleep(PAUSE_SECONDS)
        await connection.send(rest)

    data = data.replace(HIDDEN_ID.encode(), hidden_id.encode())
    answers = await strike.exchange(head_first if in_two else data, quiet_seconds=1.0)
    strike.check(len(answers) == 1, f"{name}{', in two parts' * in_two}: {len(answers)} answers to one request")


def framed(headers: str, data: bytes) -> bytes:
    """Return a request with these headers, each with its end of line."""
    return f"{HEAD}{headers}\r\n".encode() + data


def upgraded(protocol: str, connection: str = "Upgrade", headers: str = "") -> bytes:
    head = f"connection: {connection}\r\nupgrade: {protocol}\r\n{headers}content-length: {len(HIDDEN)}\r\n"
    return framed(head, HIDDEN)


def chunked(tail: bytes, headers: str = "") -> bytes:
    return framed(f"{headers}transfer-encoding: chunked\r\n", tail)


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return f"{len(data):x}".encode() + extension + b"\r\n" + data + b"\r\n"


# A server that does not speak the protocol that it is offered may answer the request as if it were not offered.
@attack("POST with Upgrade, a request in its body", REFUSED | ENDED | outcomes(200, 426, 501), bare=True,
        answer_seconds=10)  # fmt: skip
async def upgrade(strike: Strike) -> None:
    h2c = "http2-settings: AAMAAABkAAQAAP__\r\n"
    websocket = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
    await send_all(strike, {
        "h2c": upgraded("h2c", "Upgrade, HTTP2-Settings", h2c),
        "websocket": upgraded("websocket", headers=websocket),
        "TLS": upgraded("TLS/1.2"),
        "an unknown protocol": upgraded("x" * 100),
        "keep-alive as well": upgraded("h2c", "keep-alive, Upgrade", h2c),
        "with a valid body": post(COMPLETIONS, BODY, {"connection": "Upgrade", "upgrade": "h2c"}),
    })  # fmt: skip


@attack("CL+TE, two CLs, bare LF, obs-fold, no HTTP, ...", REFUSED | ENDED | outcomes(200), bare=True,
        answer_seconds=BODY_SECONDS, limit_seconds=240)  # fmt: skip
async def smuggling(strike: Strike) -> None:
    length, both = f"content-length: {len(BODY)}\r\n", BODY + HIDDEN
    ended = b"0\r\n\r\n" + HIDDEN  # behind the last chunk
    await send_all(strike, {
        "CL+TE": chunked(ended, "content-length: 4\r\n"),
        "TE+CL": framed(f"transfer-encoding: chunked\r\n{length}", ended),
        "TE.TE": chunked(ended, "transfer-encoding: identity\r\n"),
        "TE obscured": framed(f"transfer-encoding: xchunked\r\n{length}", BODY),
        "TE with a tab": framed(f"transfer-encoding:\tchunked\r\n{length}", ended),
        "TE with a space": framed(f"transfer-encoding : chunked\r\n{length}", ended),
        "two CLs": framed(f"content-length: 0\r\n{length}", HIDDEN),
        "a list of CLs": framed(f"content-length: 0, {len(BODY)}\r\n", HIDDEN),
        "CL with a plus": framed(f"content-length: +{len(BODY)}\r\n", BODY),
        "CL negative": framed("content-length: -1\r\n", HIDDEN),
        "CL beyond 64 bits": framed(f"content-length: {2**64 + len(BODY)}\r\n", BODY),
        "obs-fold": framed(f"x-folded: a\r\n {length}", HIDDEN),
        "bare LF": (HEAD + length).replace("\r\n", "\n").encode() + b"\n" + both,
        "bare CR": framed(f"x-a: b\rtransfer-encoding: chunked\r\n{length}", both),
        "NUL in a header": framed(f"x-a: b\0c\r\n{length}", both),
        "a chunk size of 40 digits": chunked(b"1" * 40 + b"\r\n" + BODY),
        "a negative chunk": chunked(b"-1\r\n" + BODY),
        "a chunk shorter than it says": chunked(b"5\r\nab\r\n" + ended),
        "HTTP/0.9": b"GET /health\r\n\r\n",
        "HTTP/2 by hand": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS to a plain port": bytes.fromhex("16030100a5010000a10303") + bytes(160),
        "garbage": bytes(range(256)) * 16,
        "only line ends": b"\r\n" * 5000,
    })  # fmt: skip


@burst("chunks whose extensions do not end, 64 MiB", REFUSED | ENDED, 2, bare=True, answer_seconds=BODY_SECONDS,
       limit_seconds=80)  # fmt: skip
def chunk_extensions(number: Number) -> list[Sent]:
    """A chunk whose extension never ends is data that is no body: no limit on bodies sees it."""
    small_chunks = b"".join(chunk(b" ", b";" + b"x" * 1000) for _ in range(20_000))
    return [chunked(b"1;" + b"x" * ENDLESS_BYTES), chunked(small_chunks)]


@burst("trailers that do not end, 64 MiB", REFUSED | ENDED | outcomes(200), 2, bare=True,
       answer_seconds=BODY_SECONDS, limit_seconds=80)  # fmt: skip
def trailers(number: Number) -> list[Sent]:
    many = b"".join(b"x-%d: y\r\n" % i for i in range(1_000_000))
    return [chunked(chunk(BODY) + b"0\r\n" + each) for each in (b"x-trailer: " + b"x" * ENDLESS_BYTES, many)]


@attack("2,000 requests at once on one connection", outcomes(200), bare=True)
async def pipelining(strike: Strike) -> None:
    """All are answered in order, or the first of them and then a refusal."""
    ask, number = request("GET", "/v1/models", headers={"connection": "keep-alive"}), strike.number(2000, 200)
    answers = await strike.exchange(ask * number, most_answers=number, quiet_seconds=5.0)
    good = sum(answer.status == 200 for answer in answers)
    is_refused = answers[-1].status == 400 and good == len(answers) - 1
    strike.check(good == number or is_refused, f"{good} of {number} pipelined requests were answered, and none refused")
