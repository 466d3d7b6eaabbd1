"""The responses that are made in the background, during and after that: `Run`, and `Runs` by their ids.

They are in the memory of this process. Everything here runs on the event loop, and knows nothing of HTTP or of the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from oaiserve.plugins.responses.store import StoredResponse
from oaiserve.plugins.shared.store_options import StoreLimits

_NEW_STATES = tuple(b"event: response.%b\n" % state for state in (b"created", b"in_progress", b"failed"))


class _StateEvent(msgspec.Struct):
    response: msgspec.Raw


_state_event = msgspec.json.Decoder(_StateEvent)


class Run:
    """One response: its state, its events so far, and a way to cancel it."""

    def __init__(self, owner: str, state: StoredResponse) -> None:
        self.owner = owner
        self.id = state.id
        self.state: StoredResponse | None = state  # None: the response is complete, and stored
        self.events: list[bytes] = []  # indexed by their sequence numbers
        self.num_event_bytes = 0
        self.is_cancelled = asyncio.Event()
        self.is_over = asyncio.Event()
        self.ended = 0.0
        self._parts: list[bytes] = []  # parts of events that are not whole yet
        self._more = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return self.num_event_bytes + (0 if self.state is None else self.state.num_bytes)

    def take(self, content: bytes) -> None:
        """Receive the next bytes of the stream. Events with the response update the state."""
        self._parts.append(content)
        if not content.endswith(b"\n\n"):
            return
        blocks = b"".join(self._parts).split(b"\n\n")
        self._parts = []
        for block in blocks:
            if not block.startswith(b"event: "):
                continue  # a comment, or [DONE], which `EventStream` adds
            self.events.append(block + b"\n\n")
            self.num_event_bytes += len(self.events[-1])
            if block.startswith(_NEW_STATES):
                self.change(bytes(_state_event.decode(block.partition(b"\ndata: ")[2]).response))
        self._wake()

    def change(self, response: bytes) -> None:
        if self.state is not None:
            self.state = self.state._replace(response=response)

    def end(self) -> None:
        self.ended = asyncio.get_running_loop().time()
        self.is_over.set()
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events after the one with this number, including future ones."""
        number = after + 1
        while True:
            more = self._more
            while number < len(self.events):
                yield self.events[number]
                number += 1
            if self.is_over.is_set():
                return
            await more.wait()

    async def cancel(self) -> None:
        """Cancel the response, and return when it has ended. A response that has completed stays complete."""
        self.is_cancelled.set()
        await self.is_over.wait()


class Runs:
    """All runs by their ids. Ended runs stay within the limits of the store: the oldest are dropped."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._runs: dict[str, Run] = {}
        self.added = asyncio.Event()  # a new one after each run

    def add(self, run: Run) -> None:
        self._runs[run.id] = run
        self.added.set()
        self.added = asyncio.Event()

    @property
    def incomplete(self) -> list[Run]:
        return [run for run in self._runs.values() if run.state is not None and not run.is_over.is_set()]

    def get(self, owner: str, response_id: str) -> Run | None:
        run = self._runs.get(response_id)
        if run is None or run.owner != owner or self._is_too_old(run):
            return None
        return run

    def remove(self, run: Run) -> None:
        self._runs.pop(run.id, None)

    def _is_too_old(self, run: Run) -> bool:
        return run.is_over.is_set() and asyncio.get_running_loop().time() - run.ended >= self._limits.seconds

    def make_room(self) -> None:
        num_bytes = sum(run.num_bytes for run in self._runs.values())
        for run in [run for run in self._runs.values() if run.is_over.is_set()]:
            is_within = len(self._runs) <= self._limits.number and num_bytes <= self._limits.num_bytes
            if is_within and not self._is_too_old(run):
                continue  # One that began later may have ended earlier.
            num_bytes -= run.num_bytes
            self.remove(run)
