"""The protocol by which a gateway and its replicas continue a stream on another replica.

The gateway gives each request its ids, and a seed for its noise, so that all replicas write the same answer. After each
piece of a stream, a replica writes a mark: a comment with the ids of the piece's tokens, which the gateway removes. If
the replica ends before the stream, the gateway sends the request to another one, with the pieces that the client has.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from oaiserve.errors import InvalidRequest

IDS_HEADER = "x-oaiserve-stream"
SENT_HEADER = "x-oaiserve-sent"  # length of the pieces, which follow the body
KIND_HEADER = "x-oaiserve-kind"  # kind of a replica: those of one kind write the same bytes
_IDS = re.compile(r"([0-9a-f]{32}) (\d{1,12}) (\d{1,20})", re.ASCII)
_MARK = b": tokens "  # the beginning of a mark, which is an event of its own
_BLANK_LINE = b"\n\n"


class Piece(NamedTuple):
    """The tokens of a choice that were sent together."""

    choice: int
    token_ids: list[int]


class StreamIds(NamedTuple):
    """The values that all servers of one request must share, so that their answers are the same."""

    unique_id: str  # 32 hexadecimal digits
    created: int  # Unix seconds
    seed: int  # a number of 64 bits, if the request has no seed

    @property
    def as_text(self) -> str:
        return f"{self.unique_id} {self.created} {self.seed}"


def ids_of(text: str) -> StreamIds | None:
    """Return the ids in a header, or None for any other text, since anyone may send the header."""
    match = _IDS.fullmatch(text)
    if match is None:
        return None
    return StreamIds(match[1], int(match[2]), int(match[3]) % 2**64)


BEGUN = Piece(0, [])  # the events before the first token
NOTHING = Piece(-1, [])  # bytes that no other server needs
SIGN = Piece(-2, [])  # a numbered event without content, which shows that the stream is alive


def mark(piece: Piece) -> bytes:
    return _MARK + msgspec.json.encode(piece) + _BLANK_LINE


class StreamSplitter:
    """Cuts a stream after complete events: after those with a mark or, if there are no marks, after each one.

    Each byte is searched once, however long lines are and however the network splits the stream.
    """

    def __init__(self, *, is_marked: bool) -> None:
        self._is_marked = is_marked
        self.rest = bytearray()  # not returned yet
        self._begin = 0  # start of the first incomplete event in `rest`

    def push(self, part: bytes) -> tuple[bytes, list[Piece]]:
        """Receive the next bytes. Return all bytes before the last cut, without marks, and the pieces of the marks
        except NOTHING. Raises msgspec.MsgspecError for an invalid mark."""
        rest = self.rest
        done = bytearray()
        pieces = []
        num_taken = 0
        at = max(self._begin, len(rest) - 1)  # `rest` may end with the first half of a blank line
        rest += part
        while (end := rest.find(_BLANK_LINE, at)) != -1:
            if not self._is_marked:
                num_taken = rest.rindex(_BLANK_LINE, end) + len(_BLANK_LINE)
                done += rest[:num_taken]
                break
            at = end + len(_BLANK_LINE)
            if rest.startswith(_MARK, self._begin):
                if (piece := _decode(rest[self._begin + len(_MARK) : end])) != NOTHING:
                    pieces.append(piece)
                done += rest[num_taken : self._begin]
                num_taken = at
            self._begin = at
        del rest[:num_taken]
        self._begin -= num_taken
        return bytes(done), pieces


def take_sent(body: bytearray, length: str) -> tuple[tuple[Piece, ...], int]:
    """Cut the end off a gateway's body, if a header announces it. Return the pieces that another server has sent of the
    stream, and the number of signs among them. Raises InvalidRequest."""
    if not length:
        return (), 0
    if not length.isdecimal() or not 0 < int(length) <= len(body):
        raise InvalidRequest(
            f"This is no request of a gateway: {SENT_HEADER} is no number of bytes at the end of the body."
        )
    content = bytes(body[-int(length) :])
    del body[-int(length) :]
    try:
        sent = _decode_all(content)
    except msgspec.MsgspecError as error:
        reason = f"the bytes of {SENT_HEADER} are no pieces: {error}"
        raise InvalidRequest(f"This is no request of a gateway: {reason}.") from None
    return tuple(piece for piece in sent if piece != SIGN), sent.count(SIGN)


_decode = msgspec.json.Decoder(Piece).decode
_decode_all = msgspec.json.Decoder(list[Piece]).decode
