"""Streams: the events of each request as an awaitable stream on the event loop, from one hand-over per step.

All of this runs on the event loop, except `LoopStreams._deliver`, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from oaiserve.engine.request import TERMINAL, Deliver, Event, Request, Terminal, TokenChunk
from oaiserve.times import RequestTimes

# Both limits count tokens. An alternative of a logprob counts as one, because it is kept and rendered like one.
MAX_CHUNK_TOKENS = 256  # of chunks that are joined: about what is rendered within half a millisecond
MAX_UNREAD_TOKENS = 2**18  # 10 to 40 MB


class RequestEngine(Protocol):
    """An engine takes the requests of streams and delivers their events, in this process or from another one."""

    def submit(self, request: Request, deliver: Deliver) -> None: ...

    def abort(self, request_id: str) -> None: ...


class LoopStream:
    """The stream of the events of one request. It has `ended` with the terminal event, even if that is never read.

    Tokens of a choice that gather while the reader is busy come in one chunk, or in few. If more than
    `max_unread_tokens` gather, the stream is `too_slow`: the request is aborted, and what has gathered can be read.
    """

    def __init__(self, request: Request, engine: RequestEngine, max_unread_tokens: int = MAX_UNREAD_TOKENS) -> None:
        self.request = request
        self.too_slow = False
        self._engine = engine
        self._max_unread_tokens = max_unread_tokens
        self._events: list[Event] = []
        self._last_chunks: dict[int, TokenChunk] = {}  # of those in _events, by choice
        self._num_unread_tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        self._on_end: Callable[[Terminal], None] | None = None
        self.times: RequestTimes | None = None  # the stamps that the latest event has carried
        self.terminal: Terminal | None = None

    @property
    def ended(self) -> bool:
        return self.terminal is not None

    async def next(self) -> list[Event]:
        """Wait for at least one event, and return all that are ready, in order for each choice.

        The last event is the terminal one. Do not call this after it.
        """
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        self._last_chunks.clear()
        self._num_unread_tokens = 0
        return events

    def abort(self) -> None:
        """Abort the request, unless it has ended. What it holds is free within a step."""
        if not self.ended:
            self._engine.abort(self.request.request_id)

    def on_end(self, callback: Callable[[Terminal], None]) -> None:
        """Call `callback` with the terminal event, at once if it has arrived already."""
        if self.terminal is not None:
            callback(self.terminal)
        else:
            self._on_end = callback

    def _push(self, event: Event) -> None:
        if isinstance(event, TokenChunk):
            self._push_chunk(event)
        else:
            self._events.append(event)
            self.times = event.times
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if isinstance(event, TERMINAL):
            self.terminal = event
            if self._on_end is not None:
                self._on_end(event)

    def _push_chunk(self, chunk: TokenChunk) -> None:
        num_tokens = _num_tokens(chunk)
        last = self._last_chunks.get(chunk.index)
        # Choices are independent, so a chunk may overtake chunks of others. It stays behind the event of its prompt.
        if last is not None and _num_tokens(last) + num_tokens <= MAX_CHUNK_TOKENS:
            append(last, chunk)
        else:
            self._events.append(chunk)
            self._last_chunks[chunk.index] = chunk
        self._num_unread_tokens += num_tokens
        # A reader that waits is not too slow, however much one step brings.
        if self._waiter is None and self._num_unread_tokens > self._max_unread_tokens and not self.too_slow:
            self.too_slow = True
            self.abort()


def append(chunk: TokenChunk, more: TokenChunk) -> None:
    """Append a chunk to the chunk before it of the same choice."""
    chunk.text += more.text
    chunk.token_ids += more.token_ids
    if chunk.logprobs is not None and more.logprobs is not None:
        chunk.logprobs += more.logprobs
    chunk.finish_reason = more.finish_reason
    chunk.stop_reason = more.stop_reason


def _num_tokens(chunk: TokenChunk) -> int:
    if chunk.logprobs:
        return len(chunk.token_ids) + sum(len(token.top) for token in chunk.logprobs)
    return len(chunk.token_ids)


class LoopStreams:
    """The open streams of one event loop. A stream stays registered until its terminal event, even without a reader."""

    def __init__(
        self, engine: RequestEngine, loop: asyncio.AbstractEventLoop, max_unread_tokens: int = MAX_UNREAD_TOKENS
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._max_unread_tokens = max_unread_tokens
        self._streams: dict[str, LoopStream] = {}

    def __len__(self) -> int:
        """Return the number of requests whose terminal event has not arrived yet."""
        return len(self._streams)

    def submit(self, request: Request) -> LoopStream:
        """Submit a request, and return its stream. Raises what the engine raises; then no event will come."""
        stream = LoopStream(request, self._engine, self._max_unread_tokens)
        self._streams[request.request_id] = stream
        try:
            self._engine.submit(request, self._deliver)
        except BaseException:
            del self._streams[request.request_id]
            raise
        return stream

    def _deliver(self, events: list[Event]) -> None:
        """Wake the event loop once for all events of a step. The engine thread calls this."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams[event.request_id]
            if isinstance(event, TERMINAL):
                del self._streams[event.request_id]
            stream._push(event)
