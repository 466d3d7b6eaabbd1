"""Reads and parses the body of a request, with limits on its size and its time."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from threading import Lock
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request

from oaiserve.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout, Unavailable
from oaiserve.http.codings import WINDOW_BYTES, Decoding, Undo, codings_of, undoing
from oaiserve.http.fair_turns import LARGE_BYTES, MUCH_BYTES, CpuTime, Work, at_once
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.routes.intake.turns import MOST_LOOP_BYTES, in_turns
from oaiserve.routes.serving import Serving, serving_of

RETRY_AFTER_SECONDS = 1
TOO_MANY_BODIES = "The server is receiving too many large bodies already; try again later."
MOST_SECONDS = 60.0  # A body must arrive within this time.
Body = TypeVar("Body", bound=msgspec.Struct)


class HeldBytes:
    """The bytes of bodies that one request holds within a limit for all requests. The end of the `with` block gives
    them back.

    A worker thread may still decode a body whose client has left, so `take` fails after that.
    """

    def __init__(self, received: SharedLimit, client: str) -> None:
        self.number = 0
        self._received = received
        self._client = client
        self._lock = Lock()
        self._has_ended = False

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._has_ended = True
            self._received.give_back(self._client, self.number)

    def take(self, number: int) -> None:
        """Hold more bytes. Raises Overloaded, and Unavailable after the end."""
        with self._lock:
            if self._has_ended:
                raise Unavailable("The client has left.")  # The tokenize stage logs any other kind of error.
            if not self._received.take(self._client, number):
                raise Overloaded(TOO_MANY_BODIES, retry_after_seconds=RETRY_AFTER_SECONDS)
            self.number += number

    def hold(self, number: int, *, must: bool = False) -> None:
        """Hold exactly this number of bytes. Raises Overloaded if there is no room for more, unless they `must` be
        counted, because they are there already. Only for the event loop."""
        more = number - self.number
        if self._has_ended:
            return
        if more <= 0:
            self.give_back(-more)
        elif must:
            with self._lock:
                self._received.add(self._client, more)
                self.number = number
        else:
            self.take(more)

    async def keep(self, body: bytearray, part: bytes) -> None:
        """Append a part to a body, and hold its bytes. Raises Overloaded."""
        self.take(len(part))
        body += part

    def give_back(self, number: int) -> None:
        with self._lock:
            self.number -= number
            self._received.give_back(self._client, number)


async def read_body(request: Request, serving: Serving) -> bytearray:
    """Read the whole JSON body of the request and undo its content codings. Raises the errors of both, Overloaded if
    clients send too many large bodies at once, and ClientDisconnect."""
    undo = undoing(request.headers.getlist("content-encoding"))
    limit_bytes = serving.body_limit
    body = bytearray()  # one buffer that grows: joining the parts would copy all of them
    is_whole = False
    try:
        with HeldBytes(serving.received_bytes, request.state.client) as held:
            await receive(request, limit_bytes, partial(held.keep, body))
        is_whole = True
    finally:
        if not is_whole:
            num_bytes = len(body)
            body.clear()
            if num_bytes >= MUCH_BYTES:
                serving.engine.give_back_later()
    check_type(request, "application/json")
    if undo is not None:
        body = await _decoded(request, body, undo, limit_bytes)
    if body.startswith(BOM_UTF8):  # Editors on Windows write this mark.
        del body[: len(BOM_UTF8)]
    return body


def check_type(request: Request, kind: str) -> None:
    """Raise InvalidRequest if the content type is not of this `kind`."""
    # A web page can send a body without a type to any server, as a form does, but its browser adds an origin.
    default = "" if "origin" in request.headers else "application/json"
    content_type = request.headers.get("content-type", default).partition(";")[0].strip().lower()
    if content_type != kind:
        if kind == "application/json":
            advice = " With curl: -H 'content-type: application/json'."
        else:
            advice = ""
        raise InvalidRequest(f"The content type must be {kind}, got {content_type[:80]!r}.{advice}")


async def pass_body(request: Request, received: SharedLimit, limit_bytes: int, use: Callable[[bytes], None]) -> None:
    """Pass the body on as it arrives, without its content codings, so that all of it is never in memory. `use` gets
    each piece, in a worker thread unless the body is small. Raises the errors of `read_body`, and those of `use`."""
    codings = codings_of(request.headers.getlist("content-encoding"))
    decoding = Decoding(codings, limit_bytes) if codings else None

    def use_all(pieces: Iterable[bytes]) -> Work[None]:
        for piece in pieces:
            use(piece)
        yield None

    cpu: CpuTime = request.state.cpu
    is_small = decoding is None and 0 < announced_bytes(request.headers) <= MOST_LOOP_BYTES

    async def pass_part(part: bytes) -> None:
        if not part:
            return
        pieces = (part,) if decoding is None else decoding.feed(part)
        if is_small:
            at_once(cpu.of(use_all(pieces)))
        else:
            await run_in_threadpool(at_once, cpu.of(use_all(pieces)))

    with HeldBytes(received, request.state.client) as held:
        held.take(len(codings) * WINDOW_BYTES)
        await receive(request, limit_bytes, pass_part)
        if decoding is not None:
            await run_in_threadpool(at_once, cpu.of(use_all(decoding.end())))


async def receive(request: Request, limit_bytes: int, use: Callable[[bytes], Awaitable[None]]) -> None:
    """Pass each part of the body on as it arrives. Raises BodyTooLarge, RequestTimeout and ClientDisconnect."""
    check_size(announced_bytes(request.headers), limit_bytes)
    num_bytes = 0
    try:
        async with asyncio.timeout(MOST_SECONDS):
            async for part in request.stream():
                num_bytes += len(part)
                check_size(num_bytes, limit_bytes)
                await use(part)
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {MOST_SECONDS:g} seconds. Please try again.") from None


def check_size(num_bytes: int, limit_bytes: int) -> None:
    """Raise BodyTooLarge if `num_bytes` is more than the limit."""
    if num_bytes > limit_bytes:
        raise BodyTooLarge(f"The body is too large: this server reads at most {int(limit_bytes)} bytes.")


def announced_bytes(headers: Headers) -> int:
    """Return the length of the body that the header states, cut to 15 digits, or 0 without the header."""
    length = headers.get("content-length", "")
    return int(length[:15]) if length.isdecimal() else 0


async def _decoded(request: Request, body: bytearray, undo: Undo, limit_bytes: int) -> bytearray:
    """Return a body without its codings: at once for a small one, in the tokenize stage for a large one."""
    with HeldBytes(serving_of(request).received_bytes, request.state.client) as held:
        work = undo(body, limit_bytes, held.take)
        try:
            next(work)
        except StopIteration as stop:
            whole: bytearray = stop.value
            return whole
        return await in_turns(request, work, max(len(body), LARGE_BYTES + 1))


async def read_into(body: bytearray, request: Request, held: HeldBytes, limit_bytes: int) -> None:
    """Read a body without an engine: worker threads undo its content codings. `held` has its bytes until the caller
    gives them back. Raises an APIError, and ClientDisconnect."""
    undo = undoing(request.headers.getlist("content-encoding"))
    await receive(request, limit_bytes, partial(held.keep, body))
    if undo is not None and body:
        whole = await run_in_threadpool(at_once, undo(body, limit_bytes, held.take))
        held.give_back(len(body))
        body[:] = whole
