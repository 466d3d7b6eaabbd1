"""Reads the body of a request, with a limit on its size and on its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from oaiserve.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMedia
from oaiserve.routes.serving import Serving

LARGE_BODY_BYTES = 64 * 1024
T = TypeVar("T")


async def read_body(request: Request, serving: Serving) -> bytes:
    """Read the whole body of the request.

    Raises BodyTooLarge, RequestTimeout, UnsupportedMedia, InvalidRequest (content type), and ClientDisconnect.
    """
    encodings = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encodings not in ("", "identity"):
        raise UnsupportedMedia(
            f"The body must not be compressed: this server reads no content-encoding, got {encodings[:80]!r}."
        )
    limit_bytes = serving.body_limit_bytes
    too_large = BodyTooLarge(f"The body is too large: this server reads at most {int(limit_bytes)} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > limit_bytes):
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(serving.body_timeout_seconds):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > limit_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        limit = f"{serving.body_timeout_seconds:g} seconds"
        raise RequestTimeout(f"The body did not arrive within {limit}. Please try again.") from None
    # A web page can send a body without a type to any server, as a form. Everything else that can is not a browser.
    default = "" if "origin" in request.headers else "application/json"
    content_type = request.headers.get("content-type", default).partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(
            f"The content type must be application/json, got {content_type[:80]!r}. "
            "With curl: -H 'content-type: application/json'."
        )
    return b"".join(parts)


async def off_loop_if_large(content: bytes, build: Callable[[], T]) -> T:
    """Return `build()`, which parses the body `content`. A large body is parsed in a worker thread, because it could
    hold up the event loop for more than a millisecond. Raises InvalidRequest for a body that is nested too deeply."""
    try:
        return build() if len(content) <= LARGE_BODY_BYTES else await run_in_threadpool(build)
    except RecursionError:  # of the decoder, or of what reads the values that it has made
        raise InvalidRequest("The body is nested too deeply.") from None
