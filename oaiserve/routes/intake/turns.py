"""Does long work on a request's body in the tokenize stage, where clients take turns, and not on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from oaiserve.errors import InvalidRequest
from oaiserve.http.fair_turns import CpuTime, Work, at_once
from oaiserve.routes.serving import serving_of

# The event loop itself does the work for bodies up to this size. A tool's schema of this size takes up to 20 ms there.
MOST_LOOP_BYTES = 2**13
Result = TypeVar("Result")


async def in_turns_if_large(request: Request, work: Work[Result], num_bytes: int, *, always: bool = False) -> Result:
    """Do work on a body: `in_turns` unless it is small, and `always` where the tokenizer is needed.

    Raises InvalidRequest for a body with too deep a nesting, and the errors of the work and of `in_turns`.
    """
    if always or num_bytes > MOST_LOOP_BYTES:
        return await in_turns(request, guarded(work), num_bytes)
    cpu: CpuTime = request.state.cpu
    return at_once(cpu.of(guarded(work)))


def guarded(work: Work[Result]) -> Work[Result]:
    """Do work on a body. Raises InvalidRequest if it is nested too deeply, and the errors of the work."""
    try:
        return (yield from work)
    except RecursionError:  # raised by the decoder, or by the readers of its values
        raise InvalidRequest("The body is nested too deeply.") from None


async def in_turns(request: Request, work: Work[Result], num_bytes: int) -> Result:
    """Do work on a body of `num_bytes` in the tokenize stage, and return its result. Each `yield` of it ends a turn.

    Raises its error, Overloaded and Unavailable if the stage takes no more work, and ClientDisconnect if the client has
    left, which ends the work early.
    """
    engine = serving_of(request).engine
    work = request.state.cpu.of(work)
    result = asyncio.wrap_future(engine.run_in_turns(work, client=request.state.client, num_bytes=num_bytes))
    left = asyncio.create_task(client_left(request.receive))
    try:
        return await unless_left(result, left)
    finally:
        left.cancel()
        del result  # An error in it refers to this frame, and so to the body.


async def unless_left(work: Awaitable[Result], left: asyncio.Task[None]) -> Result:
    """Return the result of the work, or raise its error. If the client leaves, cancel the work and raise
    ClientDisconnect."""
    is_waiting = True
    try:
        # The work has no task of its own, which would start and end it one turn of the event loop later.
        async with asyncio.timeout(None) as limit:

            def leave(_: asyncio.Task[None]) -> None:
                if is_waiting:  # The work may have ended in the same turn of the event loop, before this call.
                    limit.reschedule(0.0)

            left.add_done_callback(leave)
            try:
                return await work
            finally:
                is_waiting = False
                left.remove_done_callback(leave)
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientDisconnect from None
    finally:
        del work  # An error in it refers to this frame, and so to the body.


async def client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
