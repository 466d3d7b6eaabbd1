"""`ResponseStore`: the store of the answers of /v1/responses, for clients to read, delete and go on from.

`database.py` has it, in memory or in a file. A store knows bytes and ids, and nothing of HTTP or of the content of a
response.
"""

from __future__ import annotations

from collections.abc import Mapping
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
