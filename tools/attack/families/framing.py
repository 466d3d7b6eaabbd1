"""HTTP whose frame is unclear: a request may hide within another one, or never end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from tools.attack.attack import ATTACKER_KEY, COMPLETIONS, ENDED, REFUSED, Attack, Strike, outcomes
from tools.attack.wire import Connection, request

HIDDEN_ID = "hidden-request"  # each gets one of its own, as long as this
AT_ONCE = 8
ENDLESS_BYTES = 64 << 20
BODY_SECONDS = 65.0  # in which a server ends a request whose body does not come
KEY = {"authorization": f"Bearer {ATTACKER_KEY}"}
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
HEAD += "content-type: application/json\r\n"
PAUSE_SECONDS = 0.2
BODY = b'{"prompt": "Hi", "max_tokens": 1}'


def hidden() -> bytes:
    """Return a request that must never be answered."""
    return request("POST", COMPLETIONS, BODY, KEY | {"x-request-id": HIDDEN_ID})


async def _send_all(strike: Strike, requests: Mapping[str, bytes]) -> None:
    """Send each, at once and in two parts, and check that none of the requests hidden in them was understood as one."""
    cases = [(name, data, in_two) for name, data in requests.items() for in_two in (False, True)]
    ids = {f"hidden-{number:07}": case for number, case in enumerate(cases)}
    await strike.all([partial(_send, strike, hidden_id, *case) for hidden_id, case in ids.items()], AT_ONCE)
    await asyncio.sleep(1)  # the log comes a moment after the answer
    log = strike.log
    for hidden_id, (name, _, in_two) in ids.items():
        was_run = hidden_id.encode() in log or hidden_id in {
            each.headers.get("x-request-id") for each in strike.answers
        }
        strike.check(not was_run, f"{_what(name, in_two)}: the hidden request was run")


def _what(name: str, in_two: bool) -> str:
    return f"{name}, in two parts" if in_two else name


async def _send(strike: Strike, hidden_id: str, name: str, data: bytes, in_two: bool) -> None:
    """Send the bytes; with `in_two` the head first, and the rest a moment later, as the network may cut them."""

    async def head_first(connection: Connection) -> None:
        head, end, rest = data.partition(b"\r\n\r\n")
        await connection.send(head + end)
        await asyncio.sleep(PAUSE_SECONDS)
        await connection.send(rest)

    data = data.replace(HIDDEN_ID.encode(), hidden_id.encode())
    answers = await strike.exchange(head_first if in_two else data, quiet_seconds=1.0)
    strike.check(len(answers) == 1, f"{_what(name, in_two)}: {len(answers)} answers to one request")


def _upgrade(protocol: str, connection: str = "Upgrade") -> bytes:
    extra = "http2-settings: AAMAAABkAAQAAP__\r\n" if protocol == "h2c" else ""
    extra += "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n" * (protocol == "websocket")
    head = f"{HEAD}connection: {connection}\r\nupgrade: {protocol}\r\n{extra}content-length: {len(hidden())}\r\n\r\n"
    return head.encode() + hidden()


def _chunked(tail: bytes, headers: str = "") -> bytes:
    return f"{HEAD}{headers}transfer-encoding: chunked\r\n\r\n".encode() + tail


def _chunk(data: bytes, extension: bytes = b"") -> bytes:
    return f"{len(data):x}".encode() + extension + b"\r\n" + data + b"\r\n"


def upgrades() -> Mapping[str, bytes]:
    return {
        "h2c": _upgrade("h2c", "Upgrade, HTTP2-Settings"),
        "websocket": _upgrade("websocket"),
        "TLS": _upgrade("TLS/1.2"),
        "an unknown protocol": _upgrade("x" * 100),
        "keep-alive as well": _upgrade("h2c", "keep-alive, Upgrade"),
        "with a valid body": request("POST", COMPLETIONS, BODY, KEY | {"connection": "Upgrade", "upgrade": "h2c"}),
    }


def smuggled() -> Mapping[str, bytes]:
    length = f"content-length: {len(BODY)}\r\n"
    zero = b"0\r\n\r\n"
    return {
        "CL+TE": _chunked(zero + hidden(), "content-length: 4\r\n"),
        "TE+CL": f"{HEAD}transfer-encoding: chunked\r\n{length}\r\n".encode() + zero + hidden(),
        "TE.TE": _chunked(zero + hidden(), "transfer-encoding: identity\r\n"),
        "TE obscured": f"{HEAD}transfer-encoding: xchunked\r\n{length}\r\n".encode() + BODY,
        "TE with a tab": f"{HEAD}transfer-encoding:\tchunked\r\n{length}\r\n".encode() + zero + hidden(),
        "TE with a space": f"{HEAD}transfer-encoding : chunked\r\n{length}\r\n".encode() + zero + hidden(),
        "two CLs": f"{HEAD}content-length: 0\r\n{length}\r\n".encode() + hidden(),
        "a list of CLs": f"{HEAD}content-length: 0, {len(BODY)}\r\n\r\n".encode() + hidden(),
        "CL with a plus": f"{HEAD}content-length: +{len(BODY)}\r\n\r\n".encode() + BODY,
        "CL negative": f"{HEAD}content-length: -1\r\n\r\n".encode() + hidden(),
        "CL beyond 64 bits": f"{HEAD}content-length: {2**64 + len(BODY)}\r\n\r\n".encode() + BODY,
        "obs-fold": f"{HEAD}x-folded: a\r\n {length}\r\n".encode() + hidden(),
        "bare LF": (HEAD + length).replace("\r\n", "\n").encode() + b"\n" + BODY + hidden(),
        "bare CR": f"{HEAD}x-a: b\rtransfer-encoding: chunked\r\n{length}\r\n".encode() + BODY + hidden(),
        "NUL in a header": f"{HEAD}x-a: b\0c\r\n{length}\r\n".encode() + BODY + hidden(),
        "a chunk size of 40 digits": _chunked(b"1" * 40 + b"\r\n" + BODY),
        "a negative chunk": _chunked(b"-1\r\n" + BODY),
        "a chunk shorter than it says": _chunked(b"5\r\nab\r\n0\r\n\r\n" + hidden()),
        "HTTP/0.9": b"GET /health\r\n\r\n",
        "HTTP/2 by hand": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS to a plain port": bytes.fromhex("16030100a5010000a10303") + bytes(160),
        "garbage": bytes(range(256)) * 16,
        "only line ends": b"\r\n" * 5000,
    }  # fmt: skip


async def upgrade(strike: Strike) -> None:
    await _send_all(strike, upgrades())


async def smuggling(strike: Strike) -> None:
    await _send_all(strike, smuggled())


async def chunk_extensions(strike: Strike) -> None:
    """A chunk whose extension never ends is data that is no body: no limit on bodies sees it."""
    small_chunks = b"".join(_chunk(b" ", b";" + b"x" * 1000) for _ in range(20_000))
    data = (_chunked(b"1;" + b"x" * ENDLESS_BYTES), _chunked(small_chunks))
    await strike.all([partial(strike.raw, each) for each in data], 2)


async def trailers(strike: Strike) -> None:
    many = b"".join(b"x-%d: y\r\n" % number for number in range(1_000_000))
    last = (b"x-trailer: " + b"x" * ENDLESS_BYTES, many)
    await strike.all([partial(strike.raw, _chunked(_chunk(BODY) + b"0\r\n" + each)) for each in last], 2)


async def pipelined(strike: Strike) -> None:
    """2,000 requests on one connection at once: all answered in order, or the first of them and then a refusal."""
    ask = request("GET", "/v1/models", headers={"authorization": f"Bearer {ATTACKER_KEY}", "connection": "keep-alive"})
    number = strike.number(2000, 200)
    answers = await strike.exchange(ask * number, most_answers=number, quiet_seconds=5.0)
    good = sum(answer.status == 200 for answer in answers)
    is_refused = answers[-1].status == 400 and good == len(answers) - 1
    strike.check(good == number or is_refused, f"{good} of {number} pipelined requests were answered, and none refused")


# A server that does not speak the protocol that it is offered may answer the request as if it were not offered.
ATTACKS = (
    Attack("upgrade", "POST with Upgrade, a request in its body", upgrade, REFUSED | ENDED | outcomes(200, 426, 501),
           bare=True, answer_seconds=10),
    Attack("smuggling", "CL+TE, two CLs, bare LF, obs-fold, no HTTP, ...", smuggling, REFUSED | ENDED | outcomes(200),
           bare=True, answer_seconds=BODY_SECONDS, limit_seconds=240),
    Attack("chunk-extensions", "chunks whose extensions do not end, 64 MiB", chunk_extensions, REFUSED | ENDED,
           bare=True, answer_seconds=BODY_SECONDS, limit_seconds=80),
    Attack("trailers", "trailers that do not end, 64 MiB", trailers, REFUSED | ENDED | outcomes(200),
           bare=True, answer_seconds=BODY_SECONDS, limit_seconds=80),
    Attack("pipelining", "2,000 requests at once on one connection", pipelined, outcomes(200), bare=True),
)  # fmt: skip
