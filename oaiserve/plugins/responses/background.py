"""`BackgroundAnswer`: a response that is made in the background. Its client gets an answer at once, or follows the
response.

The task of the client's request makes it, and continues after it has answered the request. So a shutdown waits for the
response, or cuts it off, as for any other request, and its record is made at its end. If the store is a file, a
response that was cut off is made again by the next process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from oaiserve.engine.request import Usage
from oaiserve.errors import StoreFailed
from oaiserve.plugins.responses.background_store import Job
from oaiserve.plugins.responses.runs import Run
from oaiserve.plugins.responses.shape import ResponsesShape
from oaiserve.plugins.responses.state import State
from oaiserve.plugins.responses.store import StoredResponse
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.respond import Answer
from oaiserve.routes.door.middleware import as_api_error

# A response in the background waits for other work for this long. Then its turn is that of any other request. It waits
# for half of the time within which its client wants to have it.
WAIT_SECONDS = {"soonest": 30, "2h": 60 * 60, "8h": 4 * 60 * 60}
# A response that was interrupted is not begun again this long after it was accepted.
WINDOW_SECONDS = {"soonest": 24 * 60 * 60, "2h": 2 * 60 * 60, "8h": 8 * 60 * 60}

_JSON = "application/json"


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

    def __init__(
        self, answer: Answer, shape: ResponsesShape, run: Run, state: State, job: Job, *, streams: bool
    ) -> None:
        self._answer = replace(answer, before_end=self._store)
        self._put = answer.before_end
        self._shape = shape
        self._run = run
        self._runs = state.runs
        self._responses = state.store
        self._background = state.background
        self._job = job  # holds the body, and is dropped once it is stored
        self._owner = job.owner
        self._streams = streams
        self._is_submitted = asyncio.Event()
        self._is_new = True  # Otherwise, a process before this one has accepted it.
        self._is_stored_as_begun = False

    @property
    def queued(self) -> StoredResponse:
        """The response before it has begun."""
        assert self._run.state is not None
        return self._run.state

    async def accepted(self) -> BackgroundAnswer | Response:
        """Store the response. If another process makes it already, return the answer with its state. Raises Overloaded,
        InvalidRequest and StoreFailed."""
        self._run.take(self._shape.queued())
        acceptance = await self._background.accept(self._job, self.queued)
        del self._job
        if acceptance.made is not None:
            return Response(acceptance.made.response, media_type=_JSON)
        self._is_new = acceptance.is_new
        self._runs.add(self._run)
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._run
        exchange = self._answer.exchange
        answer = EventStream(run.follow(-1)) if self._streams else Response(self.queued.response, media_type=_JSON)
        telling = asyncio.create_task(self._tell(answer, scope, receive, send))
        inner = {**scope, "state": {**scope["state"], "send": self._take}, "extensions": {}}
        try:
            await self._answer(inner, self._receive, self._take)
        except (Exception, asyncio.CancelledError) as error:
            if not self._is_submitted.is_set():
                telling.cancel()
                self._runs.remove(run)
                await self._refused()
                raise
            failed = self._answer.failed(self._shape, as_api_error(error, scope))
            if not self._is_interrupted:
                run.take(failed)
        finally:
            if run.state is not None and run.is_cancelled.is_set():
                run.change(self._shape.cancelled())
            if self._is_submitted.is_set():
                await self._end()
            run.end()
            self._runs.make_room()
            del self._answer, self._put  # They hold this object, and the body: a reference cycle.
        await telling
        exchange.http_status = 200

    async def _refused(self) -> None:
        """Forget a response that the engine has refused, unless a process before this one has accepted it."""
        with suppress(StoreFailed):  # The store has logged the reason.
            if self._is_new:
                await self._background.delete(self._owner, self._run.id)
            else:
                await self._background.release(self._owner, self._run.id)

    async def _end(self) -> None:
        """Store how the response has ended, unless it is complete, which `_store` has stored."""
        run = self._run
        if run.state is None:
            return
        with suppress(StoreFailed):  # The store has logged the reason.
            if not self._is_interrupted or run.is_cancelled.is_set():
                await self._background.end(self._owner, run.id, run.state.response)
            elif self._answer.serving.engine.failure is None:  # Otherwise, this response may be the reason.
                await self._background.release(self._owner, run.id)
            run.state = None  # It is in the store.

    @property
    def _is_interrupted(self) -> bool:
        """Return whether this process ends, and the next one can make the response again."""
        exchange = self._answer.exchange
        return self._background.is_shared and exchange.error is not None and not self._answer.serving.engine.is_ready

    async def _tell(self, answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the client once the engine has accepted the request. Refusals are the same as for any request."""
        exchange = self._answer.exchange

        async def noted(message: Message) -> None:
            await send(message)
            exchange.http_status = None  # the background response has not begun

        await self._is_submitted.wait()
        await answer(scope, receive, noted)

    async def _receive(self) -> Message:
        """Report that the client has left once the response is cancelled: nothing else ends it."""
        self._is_submitted.set()
        await self._run.is_cancelled.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] != "http.response.body" or self._is_given_up or self._is_interrupted:
            return
        run = self._run
        run.take(message["body"])
        if self._background.is_shared and not self._is_stored_as_begun and run.state is not None:
            self._is_stored_as_begun = True
            with suppress(StoreFailed):  # The store has logged the reason.
                await self._background.update(self._owner, run.state)

    @property
    def _is_given_up(self) -> bool:
        return self._run.is_cancelled.is_set() and self._run.state is not None

    async def _store(self, usage: Usage) -> None:
        assert self._put is not None
        await self._put(usage)
        if not await self._background.complete(self._owner, self._run.id):
            # Another process has cancelled or deleted it during that time.
            await self._responses.delete(self._owner, self._run.id)
        self._run.state = None
