"""The form in which a gateway and its replicas speak of a stream that may go on at another replica.

The gateway gives each request its ids, and a seed for its noise, so that all replicas write the same answer. Behind
each piece of a stream a replica puts a mark: a comment with the ids of the piece's tokens, which the gateway takes out.
When the replica ends before the stream, the gateway asks another one, with the pieces that the client has.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

IDS_HEADER = "x-oaiserve-stream"
SENT_HEADER = "x-oaiserve-sent"  # how many bytes behind the body have the pieces
KIND_HEADER = "x-oaiserve-kind"  # of a replica: those of one kind write the same bytes
_IDS = re.compile(r"([0-9a-f]{32}) (\d{1,12}) (\d{1,20})", re.ASCII)
# No other line of a stream ends so: in an event, which is one line, this text would be followed by a brace.
_MARK = re.compile(rb": tokens (.*\])\n\n")


class Piece(NamedTuple):
    """The tokens of a choice that were sent together."""

    choice: int
    token_ids: list[int]


class StreamIds(NamedTuple):
    """What the answers to one request have in common, whoever writes them."""

    unique_id: str  # 32 hexadecimal digits
    created: int  # Unix seconds
    seed: int  # of 64 bits, if the request has none

    @property
    def as_text(self) -> str:
        return f"{self.unique_id} {self.created} {self.seed}"


def ids_of(text: str) -> StreamIds | None:
    """Return the ids in a header; None for any other text, since anybody may send one."""
    found = _IDS.fullmatch(text)
    return None if found is None else StreamIds(found[1], int(found[2]), int(found[3]) % 2**64)


BEGUN = Piece(0, [])  # the events before the first token
NOTHING = Piece(-1, [])  # what no other server has to know of
SIGN = Piece(-2, [])  # a numbered event without content, which shows that the stream is alive


def mark(piece: Piece) -> bytes:
    return b": tokens %b\n\n" % msgspec.json.encode(piece)


def split_at_marks(content: bytes) -> tuple[bytes, list[Piece], bytes]:
    """Return the bytes before the last mark without any marks, the marked pieces but for NOTHING, and the rest.

    Raises msgspec.MsgspecError for a mark that is none.
    """
    *found, rest = _MARK.split(content)
    pieces = [piece for text in found[1::2] if (piece := _decode(text)) != NOTHING]
    return b"".join(found[::2]), pieces, rest


def take_sent(body: bytearray, length: str) -> tuple[Piece, ...]:
    """Cut the pieces off the end of a body, where a header says so. Raises ValueError if they are none."""
    if not length:
        return ()
    if not length.isdecimal() or not 0 < int(length) <= len(body):
        raise ValueError(f"{SENT_HEADER} is no number of bytes at the end of the body")
    content = bytes(body[-int(length) :])
    del body[-int(length) :]
    try:
        return tuple(_decode_all(content))
    except msgspec.MsgspecError as error:
        raise ValueError(f"the bytes of {SENT_HEADER} are no pieces: {error}") from None


_decode = msgspec.json.Decoder(Piece).decode
_decode_all = msgspec.json.Decoder(list[Piece]).decode
