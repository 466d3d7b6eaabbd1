"""Counts what threads do to hand tokens over: hand-overs, wake-ups of an event loop, and acquisitions of locks.

Counted are acquisitions of Python's locks (`threading.Lock` and `RLock`, also within `Event` and `Condition`), what
is put into and taken out of a `queue.SimpleQueue`, whose lock is in C, and calls of `call_soon_threadsafe`, each of
which wakes an event loop. An attempt that fails does not count.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from oaiserve.engine.engine import Engine
from oaiserve.engine.event_streams import LoopStream, LoopStreams
from oaiserve.engine.request import Event, Request, TokenChunk
from oaiserve.runtime import THREADS

_Lock = threading.Lock
_RLock = threading.RLock
_SimpleQueue = queue.SimpleQueue

# What has been counted, by what was done and the thread that did it. A thread adds to its own rows alone.
counts: Counter[tuple[str, int]] = Counter()


def count(what: str) -> None:
    counts[what, threading.get_ident()] += 1


class CountedLock:
    """A lock whose acquisitions are counted."""

    def __init__(self, make: Callable[[], Any] = _Lock) -> None:
        self._lock = make()

    def acquire(self, *arguments: Any, **options: Any) -> bool:
        acquired: bool = self._lock.acquire(*arguments, **options)
        if acquired:
            count("locks")
        return acquired

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class CountedQueue(_SimpleQueue):  # type: ignore[type-arg]
    """A queue whose puts and gets are counted."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        count("queue puts")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        count("queue gets")
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)


@contextmanager
def counting(package: str = "oaiserve") -> Iterator[Counter[tuple[str, int]]]:
    """Count what objects do that modules of the package, and `threading`, make in the block. Yield the counts."""
    counted = {_Lock: CountedLock, _RLock: lambda: CountedLock(_RLock), _SimpleQueue: CountedQueue}
    names = {"Lock": _Lock, "RLock": _RLock, "SimpleQueue": _SimpleQueue}
    places: list[tuple[ModuleType, str, Any]] = []
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] == package]
    for module in [threading, queue, *modules]:
        places += [(module, name, kind) for name, kind in names.items() if module.__dict__.get(name) is kind]
    counts.clear()
    for module, name, kind in places:
        setattr(module, name, counted[kind])
    try:
        yield counts
    finally:
        for module, name, kind in places:
            setattr(module, name, kind)


class CountedLoop:
    """An event loop whose wake-ups are counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.call_soon = loop.call_soon

    def call_soon_threadsafe(self, *arguments: Any) -> None:
        count("wake-ups")
        self._loop.call_soon_threadsafe(*arguments)


class CountedStreams(LoopStreams):
    """The streams of an event loop, whose hand-overs are counted."""

    def _deliver(self, events: list[Event]) -> None:
        count("hand-overs")
        super()._deliver(events)


@dataclass(frozen=True, slots=True)
class HandOvers:
    """What streams took of the engine thread."""

    num_steps: int
    num_tokens: int
    hand_overs: int  # calls of the consumer, each with all of its events of a step
    wake_ups: int
    locks: int
    queue_puts: int
    queue_gets: int


def count_hand_overs(make_engine: Callable[[], Engine], requests: Sequence[Request]) -> HandOvers:
    """Count the hand-overs of an engine from its start to the end of all streams, which one event loop reads."""
    with counting() as counts, make_engine() as engine:
        counts.clear()
        num_tokens = asyncio.run(_read_all(engine, requests))
        (thread,) = (thread.ident for thread in threading.enumerate() if thread.name == "engine")
        did = {what: number for (what, ident), number in counts.items() if ident == thread}
        return HandOvers(
            engine.snapshot().num_steps,
            num_tokens,
            did.get("hand-overs", 0),
            did.get("wake-ups", 0),
            did.get("locks", 0),
            did.get("queue puts", 0),
            did.get("queue gets", 0),
        )


async def _read_all(engine: Engine, requests: Sequence[Request]) -> int:
    """Read the streams of all requests, and return the number of their tokens."""
    streams = CountedStreams(engine, CountedLoop(asyncio.get_running_loop()), THREADS.clock_ns)
    opened = [streams.submit(request) for request in requests]
    return sum(await asyncio.gather(*map(_read, opened)))


async def _read(stream: LoopStream) -> int:
    num_tokens = 0
    while not stream.ended:
        for event in await stream.next():
            if isinstance(event, TokenChunk):
                num_tokens += len(event.token_ids)
    return num_tokens
