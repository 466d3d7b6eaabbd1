"""Answers a prepared request on the event loop: submits it, waits for its first events, then streams or sends one body.

The request's `Shape` renders the bytes. The status line of a stream is held back until its first token, so that an
earlier error is a proper HTTP error. If a prompt takes long, its stream starts early and reports its progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.types import Receive, Scope, Send

from oaiserve.engine.event_streams import LoopStream, append
from oaiserve.engine.request import (
    TERMINAL,
    Aborted,
    Event,
    Failed,
    Finished,
    LeftOut,
    Pooled,
    PooledAs,
    Prompt,
    PromptDone,
    PromptProgress,
    Request,
    SamplingParams,
    TokenChunk,
    Usage,
)
from oaiserve.errors import APIError, InvalidRequest, Overloaded, SlowReader, StoreFailed, Unavailable, WriteTimeout
from oaiserve.http.connections import CONNECTION, WRITE_TIMED_OUT, part_writer
from oaiserve.http.fair_turns import MUCH_BYTES
from oaiserve.routes.adaptations import not_enforced
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.continued import ContinuedShape
from oaiserve.routes.answer.shape import RenderWhole, Shape
from oaiserve.routes.door.middleware import as_api_error
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.intake.read import Intake
from oaiserve.routes.intake.turns import client_left
from oaiserve.routes.serving import Serving
from oaiserve.wire.continuation import KIND_HEADER
from oaiserve.wire.routing_decision import held_elsewhere

PIECE_BYTES = 64 * 1024  # maximum bytes passed to the connection at once, and so the most that it buffers

# Estimates of the tokens that count against a key's limits until the request has ended: of the prompt, and of an answer
# without max_tokens.
BYTES_PER_TOKEN = 4
OPEN_ANSWER_TOKENS = 1024

SIGN_OF_LIFE_SECONDS = 10.0  # longest time between two signs of life while a prompt is computed


async def write(send: Send, body: bytes, *, is_last: bool = False) -> None:
    """Write `body` in pieces, and wait while the client does not read. A slow reader shows that it is alive by taking
    pieces.

    If possible, a piece ends at the end of an event, because an error event follows if a shutdown interrupts the
    wait."""
    start = 0
    while True:
        end = min(start + PIECE_BYTES, len(body))
        if end < len(body) and (last := body.rfind(sse.END, start, end)) != -1:
            end = last + len(sse.END)
        is_end = end == len(body)
        await send({"type": "http.response.body", "body": body[start:end], "more_body": not (is_last and is_end)})
        if is_end:
            return
        start = end


@dataclass(frozen=True, slots=True)
class Answer:
    """The ASGI response to a prepared request. When called, it submits the request and answers until it has ended."""

    serving: Serving
    exchange: Exchange
    request: Request
    whole: RenderWhole
    shape: Shape | None = None  # renders the answer if it is streamed, instead of `whole`
    before_end: Callable[[Usage], Awaitable[None]] | None = None  # awaited once it is complete, before its end
    media_type: str = "application/json"  # media type of a whole answer
    pooled: Callable[[Pooled], Iterable[bytes]] = lambda event: ()  # renders the result of a prompt in a stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use = self.exchange.use
        if use is not None and not self.request.sent:  # A continued stream was counted where it began.
            await use.reserve(self._most_tokens())
        stream = self.serving.streams.submit(self.request)
        self.exchange.stream = stream
        stream.on_cut = lambda: self._cut(scope)
        watch = asyncio.create_task(self._abort_when_client_leaves(scope, receive, stream))
        try:
            if self.shape is not None:
                await self._send_stream(self.shape, scope, send, stream)
            else:
                await self._send_whole(send, stream)
        except asyncio.CancelledError as error:
            if self.exchange.http_status is None:
                raise
            # The server shuts down, and the client has not read the last piece. The server closes the connection next.
            self.exchange.error = as_api_error(error, scope)
            await watch
        finally:
            watch.cancel()
            stream.close()
            if self.exchange.full_piece_bytes >= MUCH_BYTES:
                self.serving.engine.give_back_later()

    def _most_tokens(self) -> int:
        """Return how many tokens to reserve for the request: an estimate for its prompt, plus the most for its
        answer."""
        max_tokens = self.request.params.max_tokens
        context = self.serving.engine.max_model_len
        most = min(OPEN_ANSWER_TOKENS if max_tokens is None else max_tokens, context)
        return self.request.num_bytes // BYTES_PER_TOKEN + self.request.num_choices * most

    def _cut(self, scope: Scope) -> None:
        """Cut the connection after the beginning of an answer, because its client does not read."""
        connection = scope.get("extensions", {}).get(CONNECTION)
        if connection is not None and self.exchange.http_status is not None:
            connection["cut"]()

    async def _abort_when_client_leaves(self, scope: Scope, receive: Receive, stream: LoopStream) -> None:
        await client_left(receive)
        # The engine answers the abort with Aborted, which ends the wait for events.
        self.exchange.client_left = True
        if WRITE_TIMED_OUT in scope.get("extensions", {}):
            if stream.too_slow:
                self.exchange.error = _fallen_behind()
            else:
                self.exchange.error = WriteTimeout("The client has stopped reading.")
        stream.abort()

    async def _send_whole(self, send: Send, stream: LoopStream) -> None:
        prompts: list[PromptDone] = []
        choices: dict[int, Any] = {}  # or vectors
        while True:
            for event in await self._next(stream, keeps=True):
                if isinstance(event, TokenChunk):
                    self._note_finish_reason(event)
                    so_far = choices.setdefault(event.index, event)
                    if so_far is not event:
                        append(so_far, event)
                elif isinstance(event, PromptDone):
                    prompts.append(event)
                elif isinstance(event, Pooled):
                    choices[event.index] = event
                elif self.exchange.client_left:
                    return None
                elif isinstance(event, Finished) and not stream.is_cut:
                    prompts.sort(key=lambda prompt: prompt.prompt_index)
                    in_order = [choices[index] for index in sorted(choices)]
                    parts = self.whole(prompts, in_order, event.usage)
                    if self.before_end is not None:
                        await self.before_end(event.usage)
                    return await self._write_whole(send, stream, parts)
                elif (error := self._error_to_report(event)) is not None:
                    raise error

    async def _write_whole(self, send: Send, stream: LoopStream, parts: Iterator[bytes]) -> None:
        """Write an answer while it is rendered. An answer of a single piece, as nearly all are, has a
        content-length."""
        first = []
        num_bytes = 0
        for part in parts:
            first.append(part)
            num_bytes += len(part)
            if num_bytes > PIECE_BYTES:
                break
        headers = {**self._headers(), "content-type": self.media_type}
        if num_bytes <= PIECE_BYTES:
            headers["content-length"] = str(num_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})
        rest = await self._write_full_pieces(send, stream, chain(first, parts))
        await write(send, rest, is_last=True)

    async def _send_stream(self, shape: Shape, scope: Scope, send: Send, stream: LoopStream) -> None:
        events = await self._first_events(stream)
        if self.exchange.client_left:
            return
        error = self._error_to_report(events[-1])
        if error is not None and not _has_token(events):
            raise error
        headers = {**sse.HEADERS, "cache-control": "no-cache", **self._headers()}
        if self.exchange.ids is not None:
            headers[KIND_HEADER] = self.serving.kind
            shape = ContinuedShape(shape, self.request.sent, self.request.params.n, self.exchange.num_signs)
        await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})
        send = scope["state"]["send"]  # This bypasses the middleware, which saves 2 of 18 us per token.
        self.exchange.last_sign_ns = self.exchange.clock_ns()
        try:
            events = await self._tell_progress(shape, send, stream, events)
            stream.write_at_once = self._writer_at_once(shape, scope)
            while not is_over(events):
                body = await self._write_full_pieces(send, stream, self._rendered(shape, events))
                if body := body + self._activity(shape):
                    await write(send, body)
                events = await self._next(stream)
            if self.before_end is not None and isinstance(terminal := events[-1], Finished):
                del events[-1]
                if body := await self._write_full_pieces(send, stream, self._rendered(shape, events)):
                    await write(send, body)
                if not self.exchange.client_left:
                    await self.before_end(terminal.usage)
                events = [terminal]
            last = await self._write_full_pieces(send, stream, self._rendered(shape, events))
        except (Exception, asyncio.CancelledError) as unexpected:
            last = self.failed(shape, as_api_error(unexpected, scope))
        error = self.exchange.error
        if self.exchange.ids is not None and isinstance(error, Unavailable) and not isinstance(error, StoreFailed):
            return self._cut(scope)  # The gateway in front continues the stream on another server.
        await write(send, last, is_last=True)

    async def _first_events(self, stream: LoopStream) -> list[Event]:
        """Return the events up to the first token or the end, or fewer if the prompt takes long."""
        events: list[Event] = []
        begin_ns: int | None = None
        while not is_over(events) and not _has_token(events):
            if begin_ns is None:
                rest_seconds = None
            else:
                rest_seconds = (begin_ns - self.exchange.clock_ns()) / 1e9
            if rest_seconds is not None and rest_seconds <= 0:
                break
            events += await self._next(stream, keeps=True, most_seconds=rest_seconds)
            if begin_ns is None and any(isinstance(event, PromptProgress) for event in events):
                delay_ns = int(self.serving.config.server.progress_after_seconds * 1e9)
                begin_ns = self.exchange.clock_ns() + delay_ns
        return events

    async def _tell_progress(self, shape: Shape, send: Send, stream: LoopStream, events: list[Event]) -> list[Event]:
        """Write the progress of a long prompt, up to the first token or the end. Return the events from there on."""
        latest: PromptProgress | None = None
        while not is_over(events) and not _has_token(events):
            has_begun = latest is not None
            latest = next((event for event in reversed(events) if isinstance(event, PromptProgress)), latest)
            assert latest is not None
            if not has_begun and (begun := shape.begun(latest)):
                await write(send, begun)
            await write(send, shape.progress(latest) + self._activity(shape))
            events = await self._next(stream, most_seconds=SIGN_OF_LIFE_SECONDS)
        return events

    def _activity(self, shape: Shape) -> bytes:
        """Return an event that clients count as activity, if they have had none for long, for example while text is
        held back that may be a call."""
        exchange = self.exchange
        now_ns = exchange.clock_ns()
        if now_ns - exchange.last_sign_ns < shape.activity_seconds * 1e9:
            return b""
        exchange.last_sign_ns = now_ns
        return shape.activity()

    async def _write_full_pieces(self, send: Send, stream: LoopStream, parts: Iterable[bytes]) -> bytes:
        """Write each piece as soon as it is full, and return the rest.

        The events of one step hardly ever fill a piece. Those gathered for a slow reader do, and after each piece the
        other streams get a turn. Nothing more is rendered once the client has left.
        """
        piece = []
        num_bytes = 0
        for part in parts:
            piece.append(part)
            num_bytes += len(part)
            if num_bytes >= PIECE_BYTES:
                await write(send, b"".join(piece))
                self.exchange.full_piece_bytes += num_bytes
                stream.progressed()
                await asyncio.sleep(0)
                piece = []
                num_bytes = 0
                if self.exchange.client_left:
                    break
        return b"".join(piece)

    def _rendered(self, shape: Shape, events: list[Event]) -> Iterator[bytes]:
        for event in events:
            if isinstance(event, TokenChunk):
                self._note_finish_reason(event)
                yield self._delta(shape, event)
            elif isinstance(event, PromptDone):
                yield from shape.prompt(event)
            elif isinstance(event, Pooled):
                yield from self.pooled(event)
            elif (error := self._error_to_report(event)) is not None:
                yield self.failed(shape, error)
            elif isinstance(event, Finished):
                try:
                    yield from shape.finished(event.usage, self.exchange.timings)
                except InvalidRequest as refused:  # It is handled here, so that the events before it are not lost.
                    yield self.failed(shape, refused)

    def _delta(self, shape: Shape, chunk: TokenChunk) -> bytes:
        delta = shape.delta(chunk)
        if not chunk.was_sent:
            self.exchange.streamed(chunk, is_seen=bool(delta) and not delta.startswith(b":"))
        return delta

    def _writer_at_once(self, shape: Shape, scope: Scope) -> Callable[[TokenChunk], bool] | None:
        """Return a function that writes a chunk straight to the client's connection while the client is reading."""
        write = part_writer(scope)
        if write is None:
            return None

        def write_at_once(chunk: TokenChunk) -> bool:
            if not write(b""):
                return False
            write(self._delta(shape, chunk) + self._activity(shape))
            return True

        return write_at_once

    def failed(self, shape: Shape, error: APIError) -> bytes:
        exchange = self.exchange
        exchange.error = error
        ids = {"request_id": exchange.request_id, "trace_id": exchange.trace.trace_id_hex}
        return shape.failed(error.body(exchange.http_route, **ids))

    async def _next(self, stream: LoopStream, *, keeps: bool = False, most_seconds: float | None = None) -> list[Event]:
        """Return the next events, and note the room that a prompt leaves in the context if the client requested
        more."""
        events = await stream.next(keeps=keeps, most_seconds=most_seconds)
        exchange = self.exchange
        for event in events:
            if isinstance(event, PromptDone):
                self._explain_reuse(event)
            elif isinstance(event, LeftOut) and (grammar := self.request.params.grammar) is not None:
                for keyword in event.keywords:
                    exchange.adaptations.note(grammar.param, not_enforced(keyword))
            num_tokens = _num_prompt_tokens(event, self.request)
            if num_tokens is not None:
                room = self.serving.engine.max_model_len - num_tokens
                if room < (exchange.max_tokens_cut_to or self.request.params.max_tokens or 0):
                    exchange.max_tokens_cut_to = room
            elif isinstance(event, Finished):
                event.usage.max_tokens_cut_to = exchange.max_tokens_cut_to
                if exchange.wants_reuse:
                    event.usage.read_again = exchange.read_again_tokens, exchange.read_again_reason
                if exchange.has_prediction:
                    account = event.account
                    rejected = account.num_draft_tokens - account.num_accepted_tokens
                    event.usage.predicted_tokens = (account.num_accepted_tokens, rejected)
                if exchange.wants_cost:
                    event.usage.account = event.account
                else:
                    event.usage.account = None
        return events

    def _explain_reuse(self, done: PromptDone) -> None:
        exchange = self.exchange
        ids = (exchange.response_id or exchange.unique_id, exchange.request_id, exchange.client)
        # A router doesn't separate prompts by API key, and the users of different keys must not find out about each
        # other's prompts.
        is_shared = not exchange.owner or self.serving.config.shares_prefix_cache
        held = held_elsewhere(exchange.routing) if is_shared else 0.0
        exchange.prompt_reuse.read(done, *ids, self.serving.recent_prompts, exchange.clock_ns(), held)

    def _headers(self) -> dict[str, str]:
        cut_to = self.exchange.max_tokens_cut_to
        headers = self.exchange.adaptations.headers()
        if cut_to is not None:
            headers["x-max-tokens-cut-to"] = f"{cut_to}"
        if (reason := self.exchange.read_again_reason) is not None:
            headers["x-oaiserve-read-again"] = f"{self.exchange.read_again_tokens}; reason={reason}"
        return {"server-timing": self.exchange.server_timing(), **headers}

    def _note_finish_reason(self, chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            self.exchange.finish_reasons[chunk.index] = chunk.finish_reason

    def _error_to_report(self, event: Event) -> APIError | None:
        """Return the error that this event reports, or None. An abort isn't an error if the client has left."""
        stream = self.exchange.stream
        if isinstance(event, Failed):
            is_asked_elsewhere = self.exchange.ids is not None and self.serving.engine.failure is not None
            if is_asked_elsewhere:
                return Unavailable(event.error.message)
            return event.error
        if self.exchange.client_left or stream is None:
            return None
        if isinstance(event, TERMINAL) and stream.is_cut and self.exchange.http_status is None:
            return Overloaded(
                "The answers that this server holds until they are complete take too much memory, and this one takes "
                "the most. Please ask for fewer choices, tokens or log-probabilities, or stream the answer."
            )
        if not isinstance(event, Aborted):
            return None
        if stream.too_slow:
            return _fallen_behind()
        return Unavailable("The server is shutting down. Please try again.")


def answer_to(
    intake: Intake[Any],
    params: SamplingParams,
    prompts: tuple[Prompt, ...],
    shape: Shape,
    *,
    before_end: Callable[[Usage], Awaitable[None]] | None = None,
) -> Answer:
    """Return the answer that continues each prompt, rendered by `shape`. Raises InvalidRequest for too many choices."""
    request = intake.request(prompts, params)
    streamed = shape if intake.exchange.is_streaming else None
    return Answer(intake.serving, intake.exchange, request, shape.whole, streamed, before_end=before_end)


def pooled_answer_to(
    intake: Intake[Any],
    prompts: tuple[Prompt, ...],
    whole: RenderWhole,
    params: Mapping[str, str | int | float | bool],
    pooled_as: PooledAs = "text",
) -> Answer:
    """Return the answer that `whole` renders from the vectors of prompts. `params` are for the record."""
    intake.exchange.params = {**params, "num_inputs": len(prompts)}
    return Answer(intake.serving, intake.exchange, intake.pooling_request(prompts, pooled_as), whole)


def _fallen_behind() -> SlowReader:
    return SlowReader("The client has fallen too far behind its answer. Please read faster.")


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _num_prompt_tokens(event: Event, request: Request) -> int | None:
    if isinstance(event, PromptDone):
        return len(event.token_ids)
    if isinstance(event, PromptProgress) and len(request.prompts) == 1:
        return event.num_tokens
    return None


def _has_token(events: list[Event]) -> bool:
    return any(isinstance(event, TokenChunk | Pooled) for event in events)


def is_over(events: list[Event]) -> bool:
    return bool(events) and isinstance(events[-1], TERMINAL)
