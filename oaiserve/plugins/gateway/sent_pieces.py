"""The pieces of a stream that its client has. The next replica gets them if the first one ends."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oaiserve.http.shared_limit import SharedLimit
from oaiserve.wire.continuation import Piece

MOST_SENT_BYTES = 4 * 2**20  # per stream: some 300,000 tokens
MOST_KEPT_BYTES = 256 * 2**20  # limit for all streams together


class SentPieces:
    """Pieces as JSON, which takes 15 bytes per token. If they exceed a limit, all pieces of the stream are dropped, and
    no other replica can continue it."""

    def __init__(self, held: SharedLimit, client: str) -> None:
        """`held` counts the bytes of all streams."""
        self._held = held
        self._client = client
        self._text = bytearray()
        self.number = 0
        self.is_forgotten = False

    def add(self, pieces: Sequence[Piece]) -> None:
        self.number += len(pieces)
        if not pieces or self.is_forgotten:
            return
        text = msgspec.json.encode(pieces)[1:-1] + b","
        if len(self._text) + len(text) <= MOST_SENT_BYTES and self._held.take(self._client, len(text)):
            self._text += text
        else:
            self.is_forgotten = True
            self.clear()

    def as_json(self) -> bytes:
        return b"[%b]" % bytes(self._text[:-1])

    def clear(self) -> None:
        self._held.give_back(self._client, len(self._text))
        self._text.clear()
