"""`Lanes`: the responses on one socket, one after the other in each lane, and the input that steers them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

import msgspec
from starlette.types import Scope

from oaiserve.errors import Overloaded, Unavailable
from oaiserve.http.fair_turns import CpuTime
from oaiserve.plugins.responses.socket_messages import (
    Content,
    Create,
    Steer,
    joined,
    read_message,
    steer_failed,
)
from oaiserve.plugins.responses.socket_run import Emit, SocketRun, Turn
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.intake.receive import HeldBytes

MOST_CREATES = 16  # responses of one socket that run or wait
MOST_KEPT = 4  # responses that a socket keeps because the server doesn't
MOST_STEERS = 8  # inputs that wait for the end of one response


class Unsteerable(Exception):
    """Input can't steer a response. `event` gives it back to the client."""

    def __init__(self, steer: Steer, code: str, message: str) -> None:
        super().__init__(message)
        self.event = steer_failed(code, message, steer.previous_response_id, msgspec.Raw(steer.given))


class Lanes:
    """`emit` sends an event's JSON to the client. `held` counts all bytes of messages, and of what is kept of them."""

    def __init__(
        self, scope: Scope, bodies: Bodies, token_hex: Callable[[int], str], held: HeldBytes, emit: Emit
    ) -> None:
        self._scope = scope
        self._bodies = bodies
        self._token_hex = token_hex
        self._held = held
        self._emit = emit
        self.message: Content = bytearray()  # the one that is being received or read
        self._lanes: dict[str | None, deque[Create]] = {}  # requests that wait. A lane is there while it runs.
        self.tasks: set[asyncio.Task[None]] = set()  # one task per lane
        self._runs: dict[str | None, SocketRun] = {}  # keyed by lane
        self._ended: deque[str] = deque(maxlen=MOST_CREATES)  # ids of the last responses that are over
        self._kept: OrderedDict[str, Turn] = OrderedDict()
        self._pending: OrderedDict[str, bytes] = OrderedDict()  # items of accepted input by the response before it
        self._is_draining = False
        self._has_left = False  # the client
        self.drained = asyncio.Event()  # The server shuts down, and no response is running.

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all messages, turns and inputs that the lanes hold."""
        waiting = sum(create.num_bytes for lane in self._lanes.values() for create in lane)
        running = sum(run.num_bytes for run in self._runs.values())
        before = (run.before for run in self._runs.values() if run.before is not None)
        turns = {id(turn): len(turn.items) for turn in (*self._kept.values(), *before)}
        return len(self.message) + waiting + running + sum(turns.values()) + sum(map(len, self._pending.values()))

    def check_room(self, num_bytes: int) -> None:
        """Count the bytes that the lanes hold, and `num_bytes` more. Raises Overloaded if there is no room."""
        self._held.hold(self.num_bytes + num_bytes)

    def _count(self) -> None:
        self._held.hold(self.num_bytes, must=True)

    async def take(self, cpu: CpuTime) -> None:
        """Take the whole `message` of the client. `cpu` gets the time of the work on it. Raises APIError and
        Unsteerable."""
        message = self.message
        client = self._scope["state"]["client"]
        try:
            taken = await self._bodies.read(read_message(message), client=client, num_bytes=len(message), cpu=cpu)
            if isinstance(taken, Create):
                self._create(taken)
            else:
                await self._steer(taken)
        finally:
            self.drop_message()

    def drop_message(self) -> None:
        self.message = bytearray()
        self._count()

    def drain(self) -> None:
        """Accept no more requests, and let the current ones end."""
        self._is_draining = True
        if not self._lanes:
            self.drained.set()

    def leave(self) -> None:
        """Abort all responses: the client has left."""
        self._has_left = True
        for lane in self._lanes.values():
            lane.clear()
        for run in self._runs.values():
            run.leave()

    def cancel(self) -> None:
        """End all responses as failed: the time for a shutdown is over."""
        for lane in self._lanes.values():
            lane.clear()
        for task in self.tasks:
            task.cancel()

    def close(self) -> None:
        """Release the turns and inputs that are kept, once no lane runs."""
        self._kept.clear()
        self._pending.clear()
        self.drop_message()

    def _create(self, create: Create) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down. Please try again.")
        if len(self._lanes) + sum(map(len, self._lanes.values())) >= MOST_CREATES:
            raise Overloaded(f"At most {MOST_CREATES} responses may run or wait on one socket.", retry_after_seconds=1)
        stream_id = create.stream_id
        if stream_id in self._lanes:
            self._lanes[stream_id].append(create)
            return
        self._lanes[stream_id] = deque((create,))
        task = asyncio.create_task(self._run_lane(stream_id))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _steer(self, steer: Steer) -> None:
        """Take input for a running response. Raises Unsteerable."""
        response_id = steer.previous_response_id
        run = next((run for run in self._runs.values() if response_id and run.id == response_id), None)
        if steer.problem:
            raise Unsteerable(steer, "invalid_input", steer.problem)
        if not response_id:
            text = "'previous_response_id' is missing: the id of the running response."
            raise Unsteerable(steer, "invalid_input", text)
        if run is None and response_id not in self._ended:
            raise Unsteerable(steer, "response_not_found", "No response with this id runs on this socket.")
        if run is None or run.is_over:
            raise Unsteerable(steer, "response_already_completed", "The response has ended already.")
        if run.create.is_of_conversation:
            raise Unsteerable(steer, "steering_not_supported", "A response of a conversation can't be steered.")
        if len(run.steers) >= MOST_STEERS:
            text = f"At most {MOST_STEERS} inputs may wait for one response."
            raise Unsteerable(steer, "too_many_pending_steers", text)
        try:
            self.check_room(len(steer.items))
        except Overloaded as full:
            raise Unsteerable(steer, "too_many_pending_steers", full.message) from None
        await run.steer(f"steer_{self._token_hex(16)}", steer.items)

    async def _run_lane(self, stream_id: str | None) -> None:
        """Make the responses of a lane, one after the other."""
        waiting = self._lanes[stream_id]
        suffix = b"" if stream_id is None else b',"stream_id":%b}' % msgspec.json.encode(stream_id)

        async def emit(data: bytes) -> None:
            await self._emit(data[:-1] + suffix if suffix else data)

        create: Create | None = None
        try:
            while waiting:
                create = waiting.popleft()
                while create is not None and not self._has_left:
                    create = await self._run(stream_id, create, emit)
                    self._count()
        finally:
            del self._lanes[stream_id]
            self._count()
            if self._is_draining and not self._lanes:
                self.drained.set()

    async def _run(self, stream_id: str | None, create: Create, emit: Emit) -> Create | None:
        """Make a response, and return the request for the one that follows it because it was steered."""
        previous = create.previous_response_id
        steered = self._pending.pop(previous, b"")
        run = SocketRun(
            self._scope, self._bodies, create, self._kept.get(previous), steered, emit=emit, count=self._count
        )
        self._runs[stream_id] = run
        try:
            await run.play()
            return await self._after(run, previous, steered)
        finally:
            del self._runs[stream_id]

    async def _after(self, run: SocketRun, previous: str, steered: bytes) -> Create | None:
        """Keep what is needed of a response that has ended, and return the request for the one that follows it."""
        if not run.id:
            if steered:  # The next request that continues the response gets this input.
                self._pend(previous, steered)
            return None
        self._ended.append(run.id)
        if run.turn is not None:
            self._keep(run.id, run.turn)
        if not run.steers:
            return None
        if run.has_failed:
            await run.give_steers_back()
            return None
        items = joined(items for _, items in run.steers)
        if run.open_calls:
            self._pend(run.id, items)
            await run.report_pending()
            return None
        return run.create._replace(items=items, previous_response_id=run.id)

    def _pend(self, response_id: str, items: bytes) -> None:
        self._pending[response_id] = items
        if len(self._pending) > MOST_KEPT:
            self._pending.popitem(last=False)

    def _keep(self, response_id: str, turn: Turn) -> None:
        """Keep a turn for the responses that follow it, and drop the oldest turns."""
        with suppress(Overloaded):  # Then a later response gets the error that its previous one is not there.
            self.check_room(len(turn.items))
            self._kept[response_id] = turn
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
