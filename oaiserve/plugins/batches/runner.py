"""`BatchRunner` sends the lines of batches to an ASGI app, as background work: to the server's own routes, or to a
gateway.

It keeps enough lines under way to fill the engine, and some more. The outcome of a line is stored before the next line
takes its place, so a runner in another process continues where a killed one stopped. After refused lines, those of the
same owner wait (refused_lines.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.types import Message

from oaiserve.errors import Overloaded, Unauthorized, Unavailable
from oaiserve.explain.step_cost import Load
from oaiserve.http.connections import CONNECTION
from oaiserve.http.fair_turns import LARGE_BYTES
from oaiserve.plugins.batches.objects import CANCELLED, EXPIRED, Answered, Estimate, Line, request_of, result, usage_of
from oaiserve.plugins.batches.refused_lines import RefusedLines
from oaiserve.plugins.batches.store import BatchStore, Owned, Result
from oaiserve.routes.adaptations import HEADER
from oaiserve.routes.door.backend import Backend
from oaiserve.routes.door.middleware import Errors, is_refusal
from oaiserve.routes.door.own_requests import own_scope, receiving, send_for

logger = logging.getLogger(__name__)

AHEAD = 16  # lines that are tokenized or wait to be stored, in addition to the running ones
CHECK_SECONDS = 60.0
SHARED_CHECK_SECONDS = 1.0  # interval for a store that other processes use
RETRIES = 5  # retries of a line that the server refuses for the moment
RETRY_SECONDS = 1.0
# Lines whose tokens are counted for an estimate, and the most bytes of each
SAMPLED_LINES = 32
SAMPLED_BYTES = 2**16
BYTES_PER_TOKEN = 4  # assumed if no line is counted
MOST_UNDER_WAY_BYTES = 32 * 2**20  # bytes of lines, unless there is only one
MOST_READERS = 4  # readers of files, for batches that begin
PROMPT_ROWS = 256  # rows of a step of prompts, for an estimate


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that has not ended."""

    owned: Owned
    read: int = 0  # number of lines that have been taken
    lines: deque[Line] = field(default_factory=deque)
    under_way: set[asyncio.Task[None]] = field(default_factory=set)
    is_read: bool = False  # All of its lines have been taken.
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_ended: bool = False


class BatchRunner:
    """The batches under way. Everything here runs on the event loop."""

    def __init__(self, app: Starlette, backend: Backend, store: BatchStore) -> None:
        """`backend` answers the lines, for `app`."""
        self._app = app
        self._answer_to = Errors(backend.answer)
        self._engine = backend.engine
        self.backend = backend
        self.store = store
        self._clock_ns = backend.runtime.clock_ns
        self._open: dict[str, _Open] = {}  # The batch whose turn is next comes first.
        self._changed = asyncio.Event()
        self._look_ns = 0  # when to check the store for batches again
        self._refused = RefusedLines(self._clock_ns)
        self._fill_ns = 0  # when lines that wait after refused ones may begin
        self._under_way_bytes = 0
        self.readers = asyncio.Semaphore(MOST_READERS)

    async def run(self) -> None:
        try:
            while True:
                self._changed.clear()
                try:
                    if self._clock_ns() >= self._look_ns:
                        await self._look()
                    self._fill_ns = self._look_ns
                    if self._open:
                        await self._fill()
                except Unavailable:
                    pass  # The store has logged the reason, and is tried again.
                except Exception:  # Other batches, and the next look, must not suffer from this.
                    logger.exception("Batches stop until the next look at them")
                with suppress(TimeoutError):  # A batch may expire during that time.
                    wait_ns = min(self._look_ns, self._fill_ns) - self._clock_ns()
                    async with asyncio.timeout(max(0.0, wait_ns / 1e9)):
                        await self._changed.wait()
        finally:
            for one in self._open.values():
                await self._drop(one)

    async def _look(self) -> None:
        """Take the batches that this process now computes, and drop those that another process has ended."""
        self._look_ns = self._clock_ns() + int((SHARED_CHECK_SECONDS if self.store.is_shared else CHECK_SECONDS) * 1e9)
        if not self.store.may_compute():
            return
        open_batches = {owned.batch.id: owned for owned in await self.store.open_batches()}
        for batch_id in self._open.keys() - open_batches.keys():
            await self._drop(self._open.pop(batch_id))
        for batch_id, owned in open_batches.items():
            if batch_id not in self._open:
                self._open[batch_id] = _Open(owned)

    def added(self) -> None:
        """Take a batch that was just added to the store, if this process computes batches."""
        self._look_ns = 0
        self._changed.set()

    async def cancel(self, owned: Owned) -> None:
        """End a batch without the lines that are under way, whichever process computes it. This does nothing if it has
        ended."""
        await self._end(self._open.get(owned.batch.id) or _Open(owned), "cancelled", *CANCELLED)

    async def _fill(self) -> None:
        """Begin as many lines as there is room for, taking turns between batches, and end the complete batches."""
        for one in [*self._open.values()]:
            counts = one.owned.batch.request_counts
            if counts.completed + counts.failed == counts.total:
                await self._end(one, "completed")
            elif self.backend.runtime.unix_ns() > one.owned.batch.expires_at * 10**9:
                await self._end(one, "expired", *EXPIRED)
        under_way = sum(len(one.under_way) for one in self._open.values())
        room = self._engine.capacity["max_running"] + AHEAD - under_way
        while room > 0:
            has_begun = False
            for one in [*self._open.values()]:
                if not one.lines and not one.is_read:
                    one.lines += await self.store.next_lines(one.owned.batch.id, one.read)
                    one.is_read = not one.lines
                # It may have been cancelled while its lines were read.
                is_open = self._open.get(one.owned.batch.id) is one and not one.ending.locked()
                if not one.lines or not is_open or room <= 0:
                    continue
                if wait_ns := self._refused.wait_ns(one.owned.owner):
                    self._fill_ns = min(self._fill_ns, self._clock_ns() + wait_ns)
                    continue
                line = one.lines[0]
                if self._under_way_bytes and self._under_way_bytes + line.num_bytes > MOST_UNDER_WAY_BYTES:
                    continue
                self._open[one.owned.batch.id] = self._open.pop(one.owned.batch.id)
                one.lines.popleft()
                one.read = line.number
                self._under_way_bytes += line.num_bytes
                task = asyncio.create_task(self._answer(one, line, self._refused.begin(one.owned.owner)))
                one.under_way.add(task)
                task.add_done_callback(partial(self._ended, one, line))
                has_begun = True
                room = room - 1
            if not has_begun:
                return

    def _ended(self, one: _Open, line: Line, task: asyncio.Task[None]) -> None:
        one.under_way.discard(task)
        self._under_way_bytes -= line.num_bytes
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its line is not done: it is computed again when the batch continues, after the next start.
            logger.error("A line of batch %s has no answer.", one.owned.batch.id, exc_info=error)
        self._changed.set()

    async def _end(self, one: _Open, status: Any, code: str = "", message: str = "") -> None:
        async with one.ending:  # Of two clients that cancel a batch at once, both wait until it has ended.
            if one.has_ended:
                return
            await self._drop(one)
            try:
                has_ended = await self.store.end(one.owned, status, code, message)
            finally:  # If the store could not end it, the next look takes it again, with the lines just dropped.
                self._open.pop(one.owned.batch.id, None)
            one.has_ended = True
        if has_ended:
            logger.info("Batch %s is %s: %s", one.owned.batch.id, status, one.owned.batch.request_counts)

    async def _drop(self, one: _Open) -> None:
        under_way = [*one.under_way]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _answer(self, one: _Open, line: Line, charged_ns: int) -> None:
        """Answer a line, which has been charged with `charged_ns` when it began, and store the answer."""
        batch = one.owned.batch
        owned = one.owned
        task = asyncio.current_task()
        num_refused = num_unavailable = 0
        if not (request := await self._request(owned, line)):
            return  # The batch has ended during that time.
        while True:
            answered = await self._ask(batch.endpoint, request, owned, is_background=True)
            if task is not None and task.cancelling():  # The route has turned the cancellation into an answer.
                return
            if not answered.may_retry or num_unavailable == RETRIES:
                break
            # A server that ends leaves the line to the next one, and the limits of a key come to an end.
            num_unavailable += answered.status == Unavailable.status and self._engine.is_ready
            num_refused += 1
            await asyncio.sleep(min(CHECK_SECONDS, RETRY_SECONDS * 2 ** min(num_refused, 10)))
        # Alone, a wrong batch harms nobody, and its owner wants to know of it soon.
        if is_refusal(answered.status) and self.backend.has_others(answered.client):
            self._refused.refuse(owned.owner, answered.cpu_ns, charged_ns)
        usage = usage_of(answered.body) if answered.status == 200 else None
        done = Result(line.number, result(batch, line, answered), usage)
        while True:
            try:
                return await self.store.put(owned, done)
            except Unavailable:  # The store has logged the reason.
                await asyncio.sleep(RETRY_SECONDS)

    async def _request(self, owned: Owned, line: Line) -> bytes:
        """Return the request in a line of a batch's file, or b"" if the file is gone."""
        while True:
            try:
                text = await self.store.slice(owned.file, line.start, line.num_bytes)
            except Unavailable:  # The store has logged the reason.
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if len(text) > LARGE_BYTES:
                return await run_in_threadpool(request_of, text)
            if text:
                return request_of(text)
            return b""

    async def _ask(self, path: str, body: bytes, owned: Owned, *, is_background: bool) -> Answered:
        parts: list[bytes] = []
        status = 0
        retries = False
        adapted = b""

        def cut() -> None:
            nonlocal status, retries
            error = Unavailable("The server that wrote this answer has ended.")
            status = error.status
            retries = True
            parts[:] = [msgspec.json.encode(error.body(path))]

        async def send(message: Message) -> None:
            nonlocal status, retries, adapted
            if message["type"] == "http.response.start":
                status = message["status"]
                adapted = dict(message["headers"]).get(HEADER.encode(), b"")
                is_final = (b"x-should-retry", b"false") in message["headers"]
                retries = status in (Overloaded.status, Unavailable.status) and not is_final
            parts.append(message.get("body", b""))

        extensions = {CONNECTION: {"cut": cut, "awaits_body": lambda: False}}
        scope = own_scope(self._app, path, self.backend.runtime.token_hex, extensions=extensions)
        state = scope["state"]
        request_id = state["request_id"]
        if not send_for(scope, owned.owner, self.backend.keys):
            error = Unauthorized("The API key of this batch is not valid any more.")
            return Answered(error.status, False, request_id, msgspec.json.encode(error.body(path)))
        state |= {"send": send, "is_background": is_background}
        await self._answer_to(scope, receiving(body), send)
        noted = adapted.decode("latin-1")
        return Answered(status, retries, request_id, b"".join(parts), noted, state["client"], state["cpu"].ns)

    async def estimate(self, owned: Owned, lines: list[Line]) -> Estimate:
        """Return the cost of these lines. The prompts of some are counted, and the others are estimated by their
        bytes."""
        batch = owned.batch
        num_tokens = 0
        num_bytes = 0
        for line in lines[:: -(-len(lines) // SAMPLED_LINES)]:
            if line.num_bytes > SAMPLED_BYTES:
                continue
            try:
                text = await self.store.slice(owned.file, line.start, line.num_bytes)
                path, body = _counting(batch.endpoint, msgspec.json.decode(request_of(text)))
                content = msgspec.json.encode(body)
            except (ValueError, RecursionError):  # The route will refuse it.
                continue
            answered = await self._ask(path, content, owned, is_background=False)
            if answered.status == 200:
                counts = msgspec.json.decode(answered.body)
                num_tokens += counts.get("count", counts.get("input_tokens", 0))
                num_bytes += line.num_bytes
        all_bytes, most_tokens = await run_in_threadpool(_sums, lines)  # 50,000 lines take milliseconds.
        prompts = round(num_tokens * all_bytes / num_bytes if num_bytes else all_bytes / BYTES_PER_TOKEN)
        answers = 0 if batch.endpoint == "/v1/embeddings" else most_tokens
        cost = self._engine.step_cost
        rows: int = min(self._engine.capacity["max_running"], len(lines))
        if cost is None:
            return Estimate(prompts, answers, None)
        context = rows * (prompts + answers // 2) // len(lines)
        step_ns = cost.expected_ns(Load(decodes=rows, decode_context=context, draws=rows))
        prompt_ns = cost.expected_ns(Load(prompt_tokens=PROMPT_ROWS)) / PROMPT_ROWS
        return Estimate(prompts, answers, round((prompts * prompt_ns + answers / rows * step_ns) / 1e9, 1))


def _sums(lines: list[Line]) -> tuple[int, int]:
    return sum(line.num_bytes for line in lines), sum(line.most_tokens for line in lines)


def _counting(endpoint: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the request that counts the prompt tokens of another request."""
    if endpoint == "/v1/responses":
        names = ("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "reasoning")
        return "/v1/responses/input_tokens", {name: body[name] for name in names if name in body}
    prompt = body.get("prompt", body.get("input", ""))
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt))
    if "messages" in body:
        countable = {"messages": body.get("messages"), "tools": body.get("tools")}
    else:
        countable = {"prompt": prompt}
    return "/tokenize", {"model": body.get("model"), **countable}
