"""Stores the answers of /v1/responses, for clients to read, delete and go on from.

`ResponseStore` is the store for routes. `MemoryStore` has responses in this process, `database.py` in a file. A store
knows bytes and ids, and nothing of HTTP or of the content of a response.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

# Why a store drops a response: it is too old, others need its room, or it is larger than the whole store.
DROP_REASONS = ("age", "room", "size")


class StoredResponse(NamedTuple):
    """One answer with its input: one turn of a conversation."""

    id: str
    conversation_id: str  # of the conversation: the id of its first response
    previous_id: str | None  # the response that it goes on from
    response: bytes  # as JSON
    input_items: bytes  # of this turn only, as JSON

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items)


class StoreLimits(NamedTuple):
    """The bounds of a store. The number and the bytes count over all owners."""

    number: int
    num_bytes: int
    seconds: float  # since a response was stored, or since a conversation through it went on


class StoreCounts(NamedTuple):
    """The numbers of a store: its responses and bytes, and the responses dropped since it was opened.

    If processes share a file, the former count for all of them, as of the last time this one stored or deleted; the
    latter count for this one.
    """

    number: int = 0
    num_bytes: int = 0
    dropped: Mapping[str, int] = MappingProxyType(dict.fromkeys(DROP_REASONS, 0))


class ConversationTooLarge(Exception):
    """The turns of a conversation have more bytes than the caller can take."""


class ResponseStore(Protocol):
    """A store of responses by owner: no owner finds those of another.

    If there are more responses or bytes than allowed, the owner of most of them loses the oldest one. A response is as
    old as the last turn of its conversations. One too large by itself is not stored.
    """

    async def put(self, owner: str, stored: StoredResponse, /) -> None:
        """Keep a response. When this returns, a crash of the process does not lose it, if the store is a file."""

    async def get(self, owner: str, response_id: str, /) -> StoredResponse | None: ...

    async def conversation(self, owner: str, response_id: str, most_bytes: int, /) -> list[StoredResponse]:
        """Return the turns of a conversation up to this response, in order; none if one of them is not there.

        Raises ConversationTooLarge.
        """

    async def delete(self, owner: str, response_id: str, /) -> bool:
        """Forget a response, and return whether it was there."""

    def counts(self) -> StoreCounts:
        """Return the numbers of the store. Any thread may call it; it waits for nothing."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Entry:
    stored: StoredResponse
    used_at: float


@dataclass(slots=True)
class _Owned:
    """The responses of one owner, the oldest first."""

    kept: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class MemoryStore:
    """A store in this process. All of its methods are called on the event loop, and take microseconds."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._clock = clock
        self._owners: dict[str, _Owned] = {}
        self._number = 0
        self._num_bytes = 0
        self._dropped = dict.fromkeys(DROP_REASONS, 0)

    def counts(self) -> StoreCounts:
        return StoreCounts(self._number, self._num_bytes, self._dropped.copy())

    async def put(self, owner: str, stored: StoredResponse, /) -> None:
        now = self._expire()
        if stored.num_bytes > self._limits.num_bytes:
            self._dropped["size"] += 1  # it would only push others out
            return
        owned = self._owners.setdefault(owner, _Owned())
        for kept in reversed(self._chain(owned, stored.previous_id)):
            kept.used_at = now
            owned.kept.move_to_end(kept.stored.id)
        owned.kept[stored.id] = _Entry(stored, now)
        owned.num_bytes += stored.num_bytes
        self._number += 1
        self._num_bytes += stored.num_bytes
        while self._number > self._limits.number:
            self._drop_oldest(max(self._owners, key=lambda name: (len(self._owners[name].kept), name)))
        while self._num_bytes > self._limits.num_bytes:
            self._drop_oldest(max(self._owners, key=lambda name: (self._owners[name].num_bytes, name)))

    async def get(self, owner: str, response_id: str, /) -> StoredResponse | None:
        kept = self._owned(owner).kept.get(response_id)
        return None if kept is None else kept.stored

    async def conversation(self, owner: str, response_id: str, most_bytes: int, /) -> list[StoredResponse]:
        chain = [kept.stored for kept in self._chain(self._owned(owner), response_id)]
        if not chain or chain[-1].previous_id is not None:
            return []
        if sum(stored.num_bytes for stored in chain) > most_bytes:
            raise ConversationTooLarge
        return chain[::-1]

    async def delete(self, owner: str, response_id: str, /) -> bool:
        if response_id not in self._owned(owner).kept:
            return False
        self._drop(owner, response_id)
        return True

    async def close(self) -> None:
        pass

    def _chain(self, owned: _Owned, response_id: str | None) -> list[_Entry]:
        """Return a response and those before it in its conversation, as far as they are there."""
        chain = []
        while response_id is not None and (kept := owned.kept.get(response_id)) is not None:
            chain.append(kept)
            response_id = kept.stored.previous_id
        return chain

    def _owned(self, owner: str) -> _Owned:
        self._expire()
        return self._owners.get(owner) or _Owned()

    def _expire(self) -> float:
        """Drop too old responses, and return the time."""
        now = self._clock()
        for owner, owned in list(self._owners.items()):
            while owned.kept and next(iter(owned.kept.values())).used_at <= now - self._limits.seconds:
                self._drop(owner, next(iter(owned.kept)))
                self._dropped["age"] += 1
        return now

    def _drop_oldest(self, owner: str) -> None:
        self._drop(owner, next(iter(self._owners[owner].kept)))
        self._dropped["room"] += 1

    def _drop(self, owner: str, response_id: str) -> None:
        owned = self._owners[owner]
        num_bytes = owned.kept.pop(response_id).stored.num_bytes
        owned.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        self._number -= 1
        if not owned.kept:
            del self._owners[owner]
