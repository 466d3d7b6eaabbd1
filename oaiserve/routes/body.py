"""Reads the body of a request, with a limit on its size and on its time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from oaiserve.engine.turn_workers import MUCH_BYTES
from oaiserve.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout, UnsupportedMedia
from oaiserve.routes.serving import Serving

RETRY_AFTER_SECONDS = 1


async def read_body(request: Request, serving: Serving) -> bytearray:
    """Read the whole body of the request.

    Raises BodyTooLarge, RequestTimeout, UnsupportedMedia, InvalidRequest (content type), Overloaded if clients send too
    many large bodies at once, and ClientDisconnect.
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
    body = bytearray()  # one buffer that grows: to join parts would copy all of them at once
    num_bytes = 0
    is_whole = False
    client: str = request.state.client
    try:
        async with asyncio.timeout(serving.body_timeout_seconds):
            async for part in request.stream():
                if num_bytes + len(part) > limit_bytes:
                    raise too_large
                if not serving.received_bytes.take(client, len(part)):
                    raise Overloaded(
                        "The server is receiving too many large bodies already; try again later.",
                        retry_after_seconds=RETRY_AFTER_SECONDS,
                    )
                num_bytes += len(part)
                body += part
        is_whole = True
    except TimeoutError:
        limit = f"{serving.body_timeout_seconds:g} seconds"
        raise RequestTimeout(f"The body did not arrive within {limit}. Please try again.") from None
    finally:
        serving.received_bytes.give_back(client, num_bytes)
        if not is_whole:
            body.clear()
            if num_bytes >= MUCH_BYTES:
                serving.engine.give_back_later()
    # A web page can send a body without a type to any server, as a form. Everything else that can is not a browser.
    default = "" if "origin" in request.headers else "application/json"
    content_type = request.headers.get("content-type", default).partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(
            f"The content type must be application/json, got {content_type[:80]!r}. "
            "With curl: -H 'content-type: application/json'."
        )
    return body
