"""`BackgroundAnswer`: a response that is made in the background. Its client gets an answer at once, or follows the
response.

The task of the client's request makes it, and continues after it has answered the request. So a shutdown waits for the
response, or cuts it off, as for any other request, and its record is made at its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from oaiserve.engine.request import Usage
from oaiserve.plugins.responses.runs import Run, Runs
from oaiserve.plugins.responses.shape import ResponsesShape
from oaiserve.plugins.responses.store import StoredResponse
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.respond import Answer
from oaiserve.routes.door.middleware import as_api_error

# A response in the background waits for other work for this long. Then its turn is that of any other request. It waits
# for half of the time within which its client wants to have it.
WAIT_SECONDS = {"soonest": 30, "2h": 60 * 60, "8h": 4 * 60 * 60}


class EventStream(StreamingResponse):
    """The ASGI response to a client that follows a background response. A shutdown ends it."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(_with_end(events), headers={**sse.HEADERS, "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def noted(message: Message) -> None:
            nonlocal is_open
            await send(message)
            is_open = message.get("more_body", True)

        try:
            await super().__call__(scope, receive, noted)
        except asyncio.CancelledError:
            if is_open:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_end(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for event in events:
        yield event
    yield sse.DONE


class BackgroundAnswer:
    """The ASGI response to a request for a background response. It wraps the response that is made."""

    def __init__(self, answer: Answer, shape: ResponsesShape, run: Run, runs: Runs, *, streams: bool) -> None:
        self._answer = replace(answer, before_end=self._store)
        self._put = answer.before_end
        self._shape = shape
        self._run = run
        self._runs = runs
        self._streams = streams
        self._is_submitted = asyncio.Event()

    @property
    def queued(self) -> StoredResponse:
        """The response before it has begun."""
        assert self._run.state is not None
        return self._run.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._run
        exchange = self._answer.exchange
        run.take(self._shape.queued())
        self._runs.add(run)
        assert run.state is not None
        queued = Response(run.state.response, media_type="application/json")
        answer = EventStream(run.follow(-1)) if self._streams else queued
        telling = asyncio.create_task(self._tell(answer, scope, receive, send))
        inner = {**scope, "state": {**scope["state"], "send": self._take}, "extensions": {}}
        try:
            await self._answer(inner, self._receive, self._take)
        except (Exception, asyncio.CancelledError) as error:
            if not self._is_submitted.is_set():
                telling.cancel()
                self._runs.remove(run)
                raise
            run.take(self._answer.failed(self._shape, as_api_error(error, scope)))
        finally:
            if run.state is not None and run.is_cancelled.is_set():
                run.change(self._shape.cancelled())
            run.end()
            self._runs.make_room()
        await telling
        exchange.http_status = 200

    async def _tell(self, answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the client once the engine has accepted the request. Refusals are the same as for any request."""

        async def noted(message: Message) -> None:
            await send(message)
            self._answer.exchange.http_status = None  # the background response has not begun

        await self._is_submitted.wait()
        await answer(scope, receive, noted)

    async def _receive(self) -> Message:
        """Report that the client has left once the response is cancelled: nothing else ends it."""
        self._is_submitted.set()
        await self._run.is_cancelled.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not self._is_given_up:
            self._run.take(message["body"])

    @property
    def _is_given_up(self) -> bool:
        return self._run.is_cancelled.is_set() and self._run.state is not None

    async def _store(self, usage: Usage) -> None:
        assert self._put is not None
        await self._put(usage)
        self._run.state = None
