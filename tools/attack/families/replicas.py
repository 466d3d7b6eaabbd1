"""Attacks by a replica behind a gateway: reports, lists, heads, bodies and streams that lie, or have no end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from tools.attack.attack import COMPLETIONS, Family, Strike, outcomes, post, request
from tools.attack.attack import FULL as BUSY
from tools.attack.liar import FULL, LIAR, UNKNOWN, Content

REPLICAS = Family("replicas", "replicas that lie")
NOTICE_SECONDS = 2.5  # until a gateway has asked for a report
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
STREAM = HEAD + b"content-type: text/event-stream\r\nx-oaiserve-kind: k\r\n" + CHUNKED + b"\r\n"
DEEP = b"[" * 400_000


def page(content: Any) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(text), text)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def endless(begin: bytes, part: bytes) -> Callable[[], Iterable[bytes]]:
    def parts() -> Iterable[bytes]:
        yield begin
        yield from repeat(part)

    return parts


def report(**changed: Any) -> bytes:
    known: dict[str, Any] = dict.fromkeys(("number", "num_open", "waiting_tokens", "num_running", "num_waiting"), 0)
    return page(known | {"incarnation": "a", "keys": "", "kv_use": 0, "is_ready": True} | changed)


ENDLESS_PAGE = endless(HEAD + CHUNKED + b"\r\n", chunk(b" " * 65536))
REPORTS: tuple[Content, ...] = (
    ENDLESS_PAGE,
    report(models=[f"model {number}" for number in range(300_000)]),
    report(models=[f"{number}" for number in range(1000)]),
    report(keys="A" * 8_000_000),
    report(num_open=-1e300, waiting_tokens=1e300),
    report(incarnation=[], models={}, step_seconds="soon"),
    page(DEEP),
)
LISTS: tuple[Content, ...] = (
    ENDLESS_PAGE,
    page({"data": [{"id": "a", "created_at": [1]}, {"id": [], "created_at": 1}, None]}),
    page({"data": [{"id": f"{number}", "created_at": number} for number in range(100_000)], "has_more": True}),
    page({"data": [{"id": "a", "created_at": 1, "filename": "a" * 1_000_000}], "has_more": True}),
    page(b'{"data": [{"id": "a", "created_at": 1, "x": ' + DEEP),
    b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n",
)
ANSWERS: tuple[Content, ...] = (
    endless(b"HTTP/1.1 ", b"1" * 65536),
    endless(HEAD, b"a: b\r\n" * 1000),
    endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    HEAD + b"a: b",
    HEAD + b"content-length: 10\r\n\r\nhalf",
    HEAD.replace(b"200", b"204") + b"content-length: 10\r\n\r\n",
    endless(HEAD + CHUNKED + b"\r\n0\r\n", b"a: b\r\n" * 1000),
    endless(HEAD + CHUNKED + b"\r\n1;a=", b"b" * 65536),
    ENDLESS_PAGE,
    endless(STREAM, chunk(b"data: " + b"a" * 65536)),
    endless(STREAM, chunk(b"data: a\n\n" + b": tokens [0,[1,2,3,4]]\n\n" * 1000)),
    endless(STREAM, chunk(b": tokens " * 1000)),
    STREAM + chunk(b"data: a\n\n: tokens {}\n\n"),
    STREAM + chunk(b'data: a\n\n: tokens [1e9,["a"]]\n\n'),
    b"HTTP/1.1 500 No\r\n" + CHUNKED + b"\r\n",
    endless(b"HTTP/1.1 503 No\r\n" + CHUNKED + b"\r\n", chunk(b" " * 65536)),
)
GIVEN_UP = outcomes("closed", "reset", "cut", "endless", "timeout")


async def report_anew(content: Content) -> None:
    """Report this from now on. A gateway asks for reports again after a replica was not ready."""
    LIAR.is_ready = False
    await asyncio.sleep(NOTICE_SECONDS)
    LIAR.report = content
    LIAR.is_ready = True
    await asyncio.sleep(NOTICE_SECONDS)


@REPLICAS.attack("reports", outcomes(200), server="gateway", limit_seconds=120)
async def lying_reports(strike: Strike) -> None:
    for content in REPORTS[:: strike.number(1, 3)]:
        await report_anew(content)
        await strike.ask_all([request("GET", "/v1/models")] * 4, 4)
    LIAR.report = UNKNOWN


@REPLICAS.attack("lists", outcomes(200), server="gateway", limit_seconds=180)
async def lying_lists(strike: Strike) -> None:
    for content in LISTS:
        LIAR.answer = content
        await strike.ask_all([request("GET", "/v1/files"), request("GET", "/v1/batches")] * strike.number(8, 2), 8)
    strike.check(LIAR.num_answers > 0, "the gateway has not asked the replica that lies")
    LIAR.answer = FULL


@REPLICAS.attack(
    "heads, bodies and streams",
    outcomes(200, 204, 500, 502) | BUSY | GIVEN_UP,
    server="gateway",
    answer_seconds=5,
    limit_seconds=400,
    is_work=True,
)
async def lying_answers(strike: Strike) -> None:
    await report_anew(report(models=["liar"]))  # so that nobody else gets requests for it
    body = {"model": "liar", "prompt": "Hi", "max_tokens": 2, "stream": True}
    for number, content in enumerate(ANSWERS):
        num_before = LIAR.num_answers
        LIAR.answer = content
        await strike.ask_all([post(COMPLETIONS, body)] * strike.number(16, 8), 8)
        strike.check(LIAR.num_answers > num_before, f"lie {number} was not asked for")
    LIAR.answer = FULL
