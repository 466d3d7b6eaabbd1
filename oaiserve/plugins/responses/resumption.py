"""`Resumption` completes background responses that another process has left unfinished.

It sends their stored requests to this process's own route, with their ids and seeds, so the answers are the same. It
also ends responses that other processes with the same store have cancelled or deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.types import Message

from oaiserve.errors import ModelNotFound, Overloaded, Unauthorized, Unavailable
from oaiserve.plugins.responses.background_store import Abandoned
from oaiserve.plugins.responses.output import ResponseError
from oaiserve.plugins.responses.state import State
from oaiserve.routes.door.backend import Backend
from oaiserve.routes.door.middleware import Errors
from oaiserve.routes.door.own_requests import own_scope, receiving, send_for
from oaiserve.routes.serving import Serving
from oaiserve.wire.continuation import IDS_HEADER

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # interval of checks of a store that other processes use, too
MOST_RETRY_SECONDS = 60.0  # longest pause after a temporary refusal
MOST_DEATHS = 3  # processes that may end without notice while they make the same response
MOST_BYTES = 32 * 2**20  # bytes of requests that are sent at once, unless there is only one

_PATH = "/v1/responses"
_KEY_IS_GONE = "The API key of this response is not valid any more."


def ended(response: bytes, status: str, error: ResponseError | None = None) -> bytes:
    """Return a stored response with the status of one that has ended, and its error."""
    fields: dict[str, Any] = msgspec.json.decode(response)
    return msgspec.json.encode(fields | {"status": status, "error": error})


async def follow(state: State, owner: str, response_id: str, after: int) -> AsyncIterator[bytes]:
    """Yield the events of a response after the one with this number. One that was abandoned begins once this process
    makes it; the events end if another one does."""
    while (run := state.runs.get(owner, response_id)) is None:
        added = state.runs.added
        is_open = await state.background.is_open(owner, response_id)
        if not is_open or await state.background.is_made_elsewhere(owner, response_id):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await added.wait()
    async for event in run.follow(after):
        yield event


class Resumption:
    """The abandoned responses that this process makes. Everything here runs on the event loop."""

    def __init__(self, app: Starlette, state: State) -> None:
        self._app = app
        self._runs = state.runs
        self._store = state.background
        self._responses = state.store
        self._backend: Backend = app.state.backend
        self._serving: Serving = app.state.serving
        self._runtime = self._serving.runtime
        self._answer = Errors(self._backend.answer)
        self._under_way: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._under_way_bytes = 0
        self._refusals: dict[tuple[str, str], tuple[int, int]] = {}  # (number of refusals, time of the next attempt)

    async def run(self) -> None:
        """Look into the store again and again, until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except Unavailable:
                    pass  # The store has logged the reason, and is tried again.
                except Exception:  # Other responses, and the next look, must not suffer from this.
                    logger.exception("No response in the background is made again until the next look")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            tasks = [*self._under_way.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Cancel what another process has ended, and make as many abandoned responses as there is room for.

        A response may be the reason why processes end. So one during which two have ended is made alone, after the
        others.
        """
        await self._cancel_ended()
        if not self._serving.engine.is_ready:
            return
        abandoned = [one for one in await self._store.abandoned() if (one.owner, one.id) not in self._under_way]
        suspects = []
        for one in abandoned:
            if reason := self._given_up(one):
                await self._fail(one, reason)
            elif one.num_deaths > 1:
                suspects.append(one)
            else:
                await self._begin(one)
        if suspects and not self._under_way:
            await self._begin(suspects[0])

    async def _cancel_ended(self) -> None:
        runs = self._runs.incomplete
        if runs:
            own = await self._store.own()
            for run in runs:
                if (run.owner, run.id) not in own and run.state is not None:
                    run.is_cancelled.set()

    def _given_up(self, one: Abandoned) -> str:
        """Return why an abandoned response is not generated again, or "" if it will be."""
        if self._runtime.unix_ns() / 1e9 > one.expires_at:
            return "The server ended before this response was complete, and the time for its completion is over."
        if one.num_deaths >= MOST_DEATHS:
            return f"The server ended {one.num_deaths} times while it made this response."
        if not self._knows(one.owner):
            return _KEY_IS_GONE
        return ""

    def _knows(self, owner: str) -> bool:
        keys = self._backend.keys
        return keys is None or keys.of_digest(bytes.fromhex(owner)) is not None

    async def _begin(self, one: Abandoned) -> None:
        """Make a response, if there is room for it, its model is here, and it was not refused just now."""
        name = (one.owner, one.id)
        _, retry_ns = self._refusals.get(name, (0, 0))
        is_full = len(self._under_way) >= self._serving.engine.capacity["max_running"]
        has_bytes = not self._under_way or self._under_way_bytes + one.num_bytes <= MOST_BYTES
        if is_full or not has_bytes or self._runtime.clock_ns() < retry_ns:
            return
        with suppress(ModelNotFound):  # Another server of this store may have it.
            self._serving.check_model(one.model)
            logger.info("Response %s, which an earlier process has not completed, is made again.", one.id)
            self._under_way[name] = task = asyncio.create_task(self._make(one))
            self._under_way_bytes += one.num_bytes
            task.add_done_callback(lambda task: self._ended(one, task))

    def _ended(self, one: Abandoned, task: asyncio.Task[None]) -> None:
        del self._under_way[one.owner, one.id]
        self._under_way_bytes -= one.num_bytes
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Response %s could not be made again.", one.id, exc_info=error)

    async def _make(self, one: Abandoned) -> None:
        if await self._responses.get(one.owner, one.id) is not None:  # Its process ended between two writes.
            return await self._store.delete(one.owner, one.id)
        body = await self._store.body(one.owner, one.id)
        if body is None:
            return
        status, answer = await self._ask(one, body)
        if status == 200:
            self._refusals.pop((one.owner, one.id), None)
        elif status in (Overloaded.status, Unavailable.status):
            number = self._refusals.get((one.owner, one.id), (0, 0))[0]
            seconds = min(MOST_RETRY_SECONDS, LOOK_SECONDS * 2 ** min(number, 10))
            self._refusals[one.owner, one.id] = number + 1, self._runtime.clock_ns() + int(seconds * 1e9)
        else:
            await self._fail(one, msgspec.json.decode(answer)["error"]["message"])

    async def _fail(self, one: Abandoned, message: str) -> None:
        stored = await self._store.get(one.owner, one.id)
        if stored is not None:
            failed = ended(stored.response, "failed", ResponseError("server_error", message))
            await self._store.end(one.owner, one.id, failed)
            logger.warning("Response %s, which an earlier process has not completed, has failed: %s", one.id, message)

    async def _ask(self, one: Abandoned, body: bytes) -> tuple[int, bytes]:
        """Send a request to this server's own route, and return the status and the beginning of the answer. It is
        answered once the response has ended."""
        status = 0
        parts: list[bytes] = []

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status != 200:
                parts.append(message["body"])

        ids = (IDS_HEADER.encode(), one.stream_ids.as_text.encode())
        scope = own_scope(self._app, _PATH, self._runtime.token_hex, headers=[ids])
        if not send_for(scope, one.owner, self._backend.keys):
            return Unauthorized.status, msgspec.json.encode(Unauthorized(_KEY_IS_GONE).body(_PATH))
        scope["state"] |= {"send": send, "is_background": True}
        await self._answer(scope, receiving(body), send)
        return status, b"".join(parts)
