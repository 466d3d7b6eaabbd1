"""Work of a request that takes too long for the event loop: it is done in the tokenize stage, in turns by client."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from oaiserve.engine.turn_workers import LARGE_BYTES
from oaiserve.errors import InvalidRequest
from oaiserve.routes.serving import serving_of

Result = TypeVar("Result")


async def in_turns(request: Request, work: Generator[None, None, Result], num_bytes: int) -> Result:
    """Return what the work on a body of so many bytes returns. Each `yield` of it ends a turn.

    Raises its error, Overloaded and Unavailable if the stage takes no more work, and ClientDisconnect if the client has
    left. Then the work ends early.
    """
    engine = serving_of(request).engine
    result = asyncio.wrap_future(engine.run_in_turns(work, client=request.state.client, num_bytes=num_bytes))
    left = asyncio.create_task(_client_left(request))
    both: list[asyncio.Future[Any]] = [result, left]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        left.cancel()
        result.cancel()
        del result, both  # an error in them holds this frame, and the body with it


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def in_turns_if_large(request: Request, work: Generator[None, None, Result], num_bytes: int) -> Result:
    """Return what the work on a body of so many bytes returns. If the body is large, it is done as `in_turns` says,
    because it could hold up the event loop for more than a millisecond.

    Raises InvalidRequest for a body that is nested too deeply, and what the work and `in_turns` raise.
    """
    guarded = _guarded(work)
    if num_bytes > LARGE_BYTES:
        return await in_turns(request, guarded, num_bytes)
    return at_once(guarded)


def at_once(work: Generator[None, None, Result]) -> Result:
    """Do all turns of the work, and return what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def _guarded(work: Generator[None, None, Result]) -> Generator[None, None, Result]:
    try:
        return (yield from work)
    except RecursionError:  # of the decoder, or of what reads the values that it has made
        raise InvalidRequest("The body is nested too deeply.") from None
