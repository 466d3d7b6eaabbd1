"""Streams: the events of each request as an awaitable stream on the event loop, with one hand-over per step.

Everything except `LoopStreams._deliver` runs on the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from oaiserve.engine.request import (
    TERMINAL,
    Event,
    LeftOut,
    Pooled,
    PromptDone,
    PromptProgress,
    Request,
    Terminal,
    TokenChunk,
)
from oaiserve.facts.times import RequestTimes

if TYPE_CHECKING:
    from oaiserve.engine.boundary import AnyEngine

# These limits count tokens. An alternative of a logprob counts as one, because it is kept and rendered like one. A
# token takes 20 to 60 bytes, and so do eight numbers of a vector.
MAX_CHUNK_TOKENS = 256  # tokens of joined chunks: rendered within about half a millisecond
MAX_UNREAD_TOKENS = 2**18  # limit for one stream
MAX_HELD_TOKENS = 2**23  # tokens of all answers together, until they are written: 170 to 500 MB
STALLED_NS = 1_000_000_000  # A client that takes nothing for so long doesn't keep up.


class LoopStream:
    """The stream of the events of one request. `ended` is set when the terminal event arrives, read or not.

    Tokens of a choice that gather while the reader is busy are joined into one chunk, or a few. If more than
    `max_unread_tokens` gather, the stream is `too_slow`: the request is aborted, but the gathered tokens can still be
    read.
    """

    def __init__(
        self,
        request: Request,
        engine: AnyEngine,
        held: HeldTokens,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
    ) -> None:
        self.request = request
        self.too_slow = False
        self.is_cut = False
        self._engine = engine
        self._max_unread_tokens = max_unread_tokens
        self._held = held
        self._clock_ns = held.clock_ns
        self._events: list[Event] = []
        self._last_chunks: dict[int, TokenChunk] = {}  # last chunk of each choice in _events
        self._num_unread_tokens = 0  # tokens of the chunks in _events
        self._num_gathered_tokens = 0  # tokens of all _events, prompts included
        self.num_held_tokens = 0  # plus those that the reader has taken and not yet written
        self._has_reader = True
        self._busy_since_ns = 0  # when the reader last took or wrote events
        self._waiter: asyncio.Future[None] | None = None
        self._on_end: Callable[[Terminal], None] | None = None
        # Writes a chunk on behalf of a waiting reader, without waking its task, which is many coroutines deep. Returns
        # whether it wrote the chunk. If it raises, the reader gets the exception.
        self.write_at_once: Callable[[TokenChunk], bool] | None = None
        self.on_cut: Callable[[], object] = lambda: None
        self.times: RequestTimes | None = None  # the stamps that came with the latest event
        self.terminal: Terminal | None = None

    @property
    def ended(self) -> bool:
        return self.terminal is not None

    async def next(self, *, keeps: bool = False, most_seconds: float | None = None) -> list[Event]:
        """Wait for at least one event, and return all ready ones, in order for each choice: none after `most_seconds`.

        By calling this, a reader has written its last events, unless it `keeps` them. The last event is the terminal
        one. Do not call this after it.
        """
        if not keeps:
            self._hold(self._num_gathered_tokens - self.num_held_tokens)
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                if most_seconds is None:
                    await self._waiter
                else:
                    await asyncio.wait((self._waiter,), timeout=most_seconds)
            finally:
                self._waiter = None
        events = self._events
        self._events = []
        self._last_chunks.clear()
        self._num_unread_tokens = self._num_gathered_tokens = 0
        self._busy_since_ns = self._clock_ns()
        return events

    def progressed(self) -> None:
        """Note that the client has taken some of the reader's bytes."""
        self._busy_since_ns = self._clock_ns()

    def close(self) -> None:
        """Abort the request unless it has ended, and drop its unread events. The reader calls this when it leaves."""
        self.abort()
        self._let_go()
        self._held.streams.discard(self)
        # These refer to the reader, and the reader to this stream: a reference cycle that would keep the prompts alive.
        self.on_cut = lambda: None
        self.write_at_once = None

    def abort(self) -> None:
        """Abort the request unless it has ended. Its blocks are freed within one step."""
        if not self.ended:
            self._engine.abort(self.request.request_id)

    def cut(self) -> None:
        """End the stream because all answers together hold too many tokens. Its reader gets only the terminal event."""
        self.too_slow = self.is_cut = True
        self.abort()
        self._let_go()
        self.on_cut()

    @property
    def is_waiting(self) -> bool:
        """Return whether the reader is waiting for events, which means that it has read all of them."""
        return self._waiter is not None

    def stalled_ns(self, now_ns: int) -> int:
        """Return the time since the client last took any of the reader's bytes."""
        if self.is_waiting:
            return 0
        return now_ns - self._busy_since_ns

    def on_end(self, callback: Callable[[Terminal], None]) -> None:
        """Call `callback` with the terminal event, at once if it has arrived already."""
        if self.terminal is not None:
            callback(self.terminal)
        else:
            self._on_end = callback

    def push(self, event: Event) -> None:
        if isinstance(event, TokenChunk):
            if self._is_written_at_once(event):
                return
            if self._has_reader:
                self._push_chunk(event)
        elif isinstance(event, Pooled | PromptDone):
            if isinstance(event, PromptDone):
                self.times = event.times
            if self._has_reader:
                self._gather(num_tokens(event))
                self._events.append(event)
        elif isinstance(event, LeftOut):
            if self._has_reader:
                self._events.append(event)
        elif isinstance(event, PromptProgress):
            self.times = event.times
            if self._has_reader:
                self._events.append(event)
        else:
            self.times = event.times
            self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if isinstance(event, TERMINAL):
            self.terminal = event
            # The callback refers to this stream, so together they would keep the prompts in memory.
            on_end = self._on_end
            self._on_end = None
            if on_end is not None:
                on_end(event)

    def _is_written_at_once(self, chunk: TokenChunk) -> bool:
        waiter = self._waiter
        if self.write_at_once is None or waiter is None or waiter.done() or chunk.finish_reason is not None:
            return False
        if num_tokens(chunk) > MAX_CHUNK_TOKENS:
            return False
        try:
            return self.write_at_once(chunk)
        except Exception as error:
            waiter.set_exception(error)
            return True

    def _push_chunk(self, chunk: TokenChunk) -> None:
        num_more = num_tokens(chunk)
        last = self._last_chunks.get(chunk.index)
        # Choices are independent, so a chunk may overtake those of other choices, but never the event of its prompt.
        if last is not None and can_append(last, chunk):
            append(last, chunk)
        else:
            self._events.append(chunk)
            self._last_chunks[chunk.index] = chunk
        self._num_unread_tokens += num_more
        self._gather(num_more)
        # A waiting reader is never too slow, however much a single step brings.
        if self._waiter is None and self._num_unread_tokens > self._max_unread_tokens and not self.too_slow:
            self.too_slow = True
            self.abort()

    def _let_go(self) -> None:
        """Drop all events, now and from now on, except the terminal one."""
        self._has_reader = False
        self._events = [event for event in self._events if isinstance(event, TERMINAL)]
        self._last_chunks.clear()
        self._num_unread_tokens = self._num_gathered_tokens = 0
        self._hold(-self.num_held_tokens)

    def _gather(self, num_more: int) -> None:
        self._num_gathered_tokens += num_more
        self._hold(num_more)

    def _hold(self, num_more: int) -> None:
        self.num_held_tokens += num_more
        self._held.number += num_more


class HeldTokens:
    """The unwritten tokens of all answers, and the rule that chooses which stream to cut if there are too many.

    Streams whose clients have read nothing for a second are cut first, beginning with the highest product of tokens and
    time. If there are none, most tokens belong to answers that are sent whole, and the largest of these is cut. Readers
    that keep up are cut last.
    """

    def __init__(self, clock_ns: Callable[[], int], limit: int = MAX_HELD_TOKENS, stalled_ns: int = STALLED_NS) -> None:
        self.clock_ns = clock_ns
        self.limit = limit
        self.stalled_ns = stalled_ns
        self.number = 0
        self.streams: set[LoopStream] = set()

    def check(self) -> None:
        while self.number > self.limit:
            now_ns = self.clock_ns()
            max(self.streams, key=lambda stream: self._cost(stream, now_ns)).cut()

    def _cost(self, stream: LoopStream, now_ns: int) -> tuple[int, bool, int]:
        """Return how costly a stream is for the others, as a sort key."""
        held = stream.num_held_tokens
        stalled_ns = stream.stalled_ns(now_ns)
        return held * stalled_ns if stalled_ns >= self.stalled_ns else 0, stream.is_waiting and held > 0, held


def append(chunk: TokenChunk, more: TokenChunk) -> None:
    """Append a chunk to the previous chunk of the same choice."""
    chunk.text += more.text
    chunk.token_ids += more.token_ids
    if chunk.text_lengths is not None and more.text_lengths is not None:
        chunk.text_lengths += more.text_lengths
    if chunk.logprobs is not None and more.logprobs is not None:
        chunk.logprobs.extend(more.logprobs)
    chunk.finish_reason = more.finish_reason
    chunk.stop_reason = more.stop_reason
    chunk.has_end_token = more.has_end_token


def joined(steps: list[list[Event]]) -> list[Event]:
    """Return the events of several steps, with consecutive chunks of the same choice joined."""
    events: list[Event] = []
    last_chunks: dict[str, dict[int, TokenChunk]] = {}  # by request: its chunks since its last event of another kind
    for event in chain.from_iterable(steps):
        if not isinstance(event, TokenChunk):
            last_chunks.pop(event.request_id, None)
        elif (of_choices := last_chunks.get(event.request_id)) is None:
            last_chunks[event.request_id] = {event.index: event}
        elif (last := of_choices.get(event.index)) is not None and can_append(last, event):
            append(last, event)
            continue
        else:
            of_choices[event.index] = event
        events.append(event)
    return events


def can_append(chunk: TokenChunk, more: TokenChunk) -> bool:
    """Return whether a chunk may be joined with the next one of its choice."""
    if chunk.was_sent or more.was_sent:
        return False  # Another server has sent it as a separate chunk.
    return num_tokens(chunk) + num_tokens(more) <= MAX_CHUNK_TOKENS


def num_tokens(event: TokenChunk | PromptDone | Pooled) -> int:
    """Return the size of an event in tokens, including alternatives. Eight numbers of a vector count as one token."""
    if isinstance(event, Pooled):
        return -(-len(event.vector) // 8)
    if event.logprobs is None:
        return len(event.token_ids)
    return max(len(event.token_ids), event.logprobs.num_entries)


class LoopStreams:
    """The open streams of one event loop. A stream stays registered until its terminal event, even without a reader."""

    stream_type = LoopStream

    def __init__(
        self,
        engine: AnyEngine,
        loop: asyncio.AbstractEventLoop,
        clock_ns: Callable[[], int],
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        max_held_tokens: int = MAX_HELD_TOKENS,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._max_unread_tokens = max_unread_tokens
        self.held = HeldTokens(clock_ns, max_held_tokens)
        self._streams: dict[str, LoopStream] = {}
        self._arrived: list[list[Event]] = []  # events of steps that haven't been pushed to streams yet

    def __len__(self) -> int:
        """Return the number of requests whose terminal event has not arrived yet."""
        return len(self._streams)

    def submit(self, request: Request) -> LoopStream:
        """Submit a request, and return its stream, which its reader closes. Raises the engine's errors."""
        stream = self.stream_type(request, self._engine, self.held, self._max_unread_tokens)
        self._streams[request.request_id] = stream
        try:
            self._engine.submit(request, self._deliver)
        except BaseException:
            del self._streams[request.request_id]
            raise
        self.held.streams.add(stream)
        return stream

    def _deliver(self, events: list[Event]) -> None:
        """Wake the event loop once for all events of a step. The engine thread calls this."""
        self._loop.call_soon_threadsafe(self._arrive, events)

    def _arrive(self, events: list[Event]) -> None:
        """Store the events of a step. If the loop is behind, several steps are stored before `_dispatch` runs."""
        self._arrived.append(events)
        if len(self._arrived) == 1:
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Push the events of all steps that have arrived, so that each stream writes its tokens in one go."""
        steps = self._arrived
        self._arrived = []
        for event in steps[0] if len(steps) == 1 else joined(steps):
            stream = self._streams[event.request_id]
            if isinstance(event, TERMINAL):
                del self._streams[event.request_id]
            stream.push(event)
        self.held.check()
