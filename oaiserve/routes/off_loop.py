"""Long work of requests, away from the event loop: it is done in the tokenize stage, in turns by client."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from oaiserve.engine.turn_workers import LARGE_BYTES
from oaiserve.errors import InvalidRequest
from oaiserve.routes.serving import serving_of

Result = TypeVar("Result")


async def in_turns(request: Request, work: Generator[None, None, Result], num_bytes: int) -> Result:
    """Do work on a body of `num_bytes` in the tokenize stage, and return its result. Each `yield` of it ends a turn.

    Raises its error, Overloaded and Unavailable if the stage takes no more work, and ClientDisconnect if the client has
    left, which ends the work early.
    """
    engine = serving_of(request).engine
    result = asyncio.wrap_future(engine.run_in_turns(work, client=request.state.client, num_bytes=num_bytes))
    left = asyncio.create_task(client_left(request.receive))
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


async def client_left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def in_turns_if_large(request: Request, work: Generator[None, None, Result], num_bytes: int) -> Result:
    """Do work on a body: `in_turns` if the body is large, as it could hold up the event loop for over a millisecond.

    Raises InvalidRequest for a body with too deep a nesting, and the errors of the work and of `in_turns`.
    """
    guarded = _guarded(work)
    if num_bytes > LARGE_BYTES:
        return await in_turns(request, guarded, num_bytes)
    return at_once(guarded)


def at_once(work: Generator[None, None, Result]) -> Result:
    """Do all turns of the work, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def _guarded(work: Generator[None, None, Result]) -> Generator[None, None, Result]:
    try:
        return (yield from work)
    except RecursionError:  # of the decoder, or of the readers of its values
        raise InvalidRequest("The body is nested too deeply.") from None
