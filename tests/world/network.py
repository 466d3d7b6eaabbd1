"""The network of the world: connections in memory, whose bytes come in order, late, in pieces, or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from zlib import crc32

from tests.world.loop import Process, State, World

WINDOW_BYTES = 16 * 1024  # bytes that a process may leave in its socket before its peer must wait
MOST_READ_BYTES = 256 * 1024  # that an event loop reads from a socket at once
KEEPALIVE_SECONDS = 10.5
END = b""


def reset() -> ConnectionResetError:
    return ConnectionResetError(104, "Connection reset by peer")


class Network:
    """All connections. `blocked` are the pairs of machines between which nothing comes through, `down` those off."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.network = self
        self.listeners: dict[tuple[str, int], tuple[Process, Callable[[End], None]]] = {}
        self.ends: dict[End, None] = {}
        self.blocked: set[frozenset[str]] = set()
        self.down: set[str] = set()
        self.late_seconds = 0.0  # Any packet may come this much later, for a while.

    def delay(self) -> float:
        draw = self.world.random.random
        return 0.0002 + 0.002 * draw() ** 3 + (self.late_seconds * draw() if self.late_seconds else 0.0)

    def is_cut(self, here: str, there: str) -> bool:
        return here in self.down or there in self.down or frozenset((here, there)) in self.blocked

    def block(self, here: str, there: str) -> None:
        self.blocked.add(frozenset((here, there)))
        self._watch_for_keepalive()

    def heal(self, here: str, there: str) -> None:
        self.blocked.discard(frozenset((here, there)))
        for end in [*self.ends]:
            end.look()

    def switch_off(self, ip: str) -> None:
        self.down.add(ip)
        self._watch_for_keepalive()

    def switch_on(self, ip: str) -> None:
        """Restart a machine. It has lost its connections, and resets any that a peer still has."""
        self.down.discard(ip)
        for end in [*self.ends]:
            if end.remote[0] == ip and end.peer.is_lost:
                end.take_later(reset())

    def _watch_for_keepalive(self) -> None:
        for end in [*self.ends]:
            if end.has_keepalive and self.is_cut(end.local[0], end.remote[0]):
                self.world.call_later(KEEPALIVE_SECONDS, end.time_out, context=end.process.context)

    async def connect(self, process: Process, make: Callable[[], Any], ip: str, port: int) -> Any:
        await asyncio.sleep(self.delay())
        while self.is_cut(process.ip, ip):  # noqa: ASYNC110 - as systems try again
            await asyncio.sleep(0.5)
        listener = self.listeners.get((ip, port))
        if listener is None or process.state is State.DEAD:
            raise ConnectionRefusedError(111, "Connection refused")
        near_place = (process.ip, 30000 + next(self.world.numbers) % 30000)
        near = End(self, process, near_place, (ip, port))
        far = End(self, listener[0], (ip, port), near_place)
        near.peer = far
        far.peer = near
        self.world.call_later(self.delay(), listener[1], far, context=listener[0].context)
        near.attach(protocol := make())
        return near, protocol

    def kill(self, process: Process, how: str) -> None:
        """Close what a dead process had, by a `reset`, or in silence when the `power` of its machine fails."""
        self.listeners = {place: each for place, each in self.listeners.items() if each[0] is not process}
        if how == "power":
            self.switch_off(process.ip)
        for end in [end for end in self.ends if end.process is process]:
            if how != "power":
                end.send(reset() if how == "reset" else END)
            end.lose(None)


class End(asyncio.Transport):
    """One end of a connection, as the transport of its process, and as its socket."""

    peer: End

    def __init__(self, network: Network, process: Process, local: tuple[str, int], remote: tuple[str, int]) -> None:
        super().__init__()
        self.network = network
        self.process = process
        self.local = local
        self.remote = remote
        self.protocol: Any = None
        self.is_lost = self.has_keepalive = False
        self._is_closing = self._is_paused = self._has_paused_writing = False
        self._incoming: deque[tuple[float, Any]] = deque()
        self._unsent: deque[bytes] = deque()
        self._num_untaken = 0  # bytes that the peer's process has not taken
        self._last_arrival = 0.0
        self._high = 64 * 1024
        network.ends[self] = None

    # -- as a socket --------------------------------------------------------------------------------------------------

    def getpeername(self) -> tuple[str, int]:
        return self.remote

    def getsockname(self) -> tuple[str, int]:
        return self.local

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.has_keepalive = True

    def attach(self, protocol: Any) -> None:
        self.protocol = protocol
        if self.is_lost:
            raise reset()
        protocol.connection_made(self)
        self.look()

    # -- as a transport -----------------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def is_closing(self) -> bool:
        return self._is_closing or self.is_lost

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.send(END)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self.look()

    def write(self, data: Any) -> None:
        if self.is_closing() or not data:
            return
        for start in range(0, len(data), MOST_READ_BYTES):
            self._unsent.append(bytes(data[start : start + MOST_READ_BYTES]))
        self._flush()
        if self._unsent and sum(map(len, self._unsent)) >= self._high and not self._has_paused_writing:
            self._has_paused_writing = True
            self.protocol.pause_writing()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._flush()

    def abort(self) -> None:
        if not self.is_lost:
            self._unsent.clear()
            self._is_closing = True
            self.send(reset())
            self.network.world.call_soon(self.lose, None, context=self.process.context)

    # -- the way between the two --------------------------------------------------------------------------------------

    def _flush(self) -> None:
        while self._unsent and self._num_untaken < WINDOW_BYTES:
            data = self._unsent.popleft()
            self._num_untaken += len(data)
            draw = self.network.world.random
            if len(data) > 1 and draw.random() < 0.15:
                at = draw.randrange(1, len(data))
                self.send(data[:at])
                self.send(data[at:])
            else:
                self.send(data)
        if not self._unsent and self._has_paused_writing:
            self._has_paused_writing = False
            self.protocol.resume_writing()
        if not self._unsent and self._is_closing and not self.is_lost:
            self.send(END)
            self.network.world.call_soon(self.lose, None, context=self.process.context)

    def send(self, item: Any) -> None:
        if not self.is_lost:
            self.peer.take_later(item)

    def take_later(self, item: Any) -> None:
        """Let data, the end or an error arrive at this end."""
        world = self.network.world
        self._last_arrival = max(self._last_arrival, world.now + self.network.delay())
        self._incoming.append((self._last_arrival, item))
        world.call_at(self._last_arrival, self.look, context=self.process.context)

    def look(self) -> None:
        """Take what has arrived."""
        world = self.network.world
        while self._incoming and self._incoming[0][0] <= world.now and self.protocol is not None:
            if self.network.is_cut(self.local[0], self.remote[0]) or self._is_paused:
                return
            if self.process.state is State.STOPPED:  # `go_on` calls this again
                self.process.held.append(asyncio.Handle(self.look, (), world, self.process.context))
                return
            _, item = self._incoming.popleft()
            if isinstance(item, bytes) and item:
                world.note(self.local[0], "<", self.remote[0], len(item), crc32(item))
                world.call_later(self.network.delay(), self.peer.taken, len(item), context=self.peer.process.context)
                if self.is_lost:
                    self.peer.take_later(reset())
                    self._incoming.clear()
                elif not self._is_closing:
                    self.protocol.data_received(item)
            elif self.is_lost:
                continue
            elif item == END:
                if not self.protocol.eof_received():
                    self.close()
            else:
                self.lose(item)

    def taken(self, number: int) -> None:
        self._num_untaken -= number
        if not self.is_lost:
            self._flush()

    def time_out(self) -> None:
        if self.network.is_cut(self.local[0], self.remote[0]):
            self.lose(TimeoutError(110, "Connection timed out"))

    def lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self.network.ends.pop(self, None)
            self._unsent.clear()
            if self.protocol is not None:
                self.protocol.connection_lost(error)
