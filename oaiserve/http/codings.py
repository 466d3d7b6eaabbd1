"""Content codings: decodes compressed bodies in pieces and within bounds, and compresses the pages of metrics.

Decompression bombs are refused early: no coding of a list may decode to more than the limit of the body.
`backports.zstd` is the module of Python 3.14 for earlier versions. Unlike other packages, it limits the size of each
result.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import BodyTooLarge, InvalidRequest, UnsupportedMedia

CODINGS = ("zstd", "gzip", "deflate")
MOST_CODINGS = 3  # maximum codings of one body
MOST_MEMBERS = 10_000  # maximum members of gzip or zstd in one body, because each needs a new decoder
PIECE_BYTES = 2**16  # bytes that are decoded in one turn
_INPUT_BYTES = 2**14  # bytes that a decoder gets at once
_LEAST_TURN_BYTES = 2**12  # A piece counts as at least this much of a turn, because even an empty one takes time.
_WINDOW_LOG = 23  # zstd's limit for HTTP in RFC 9659
WINDOW_BYTES = 2**_WINDOW_LOG  # maximum memory that a decoder holds
_GZIP_LEVEL = 4


# Takes a body, the size limit of the decoded body, and a function that is called with the size of each piece.
Undo = Callable[[bytearray, int, Callable[[int], None]], Generator[None, None, bytearray]]


class _Decoder(Protocol):
    """A decoder with the interface of those in `bz2`, `lzma` and `compression.zstd`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _Inflate:
    """A `_Decoder` of zlib's formats."""

    def __init__(self, window_bits: int) -> None:
        self._inner: Any = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        piece = bytes(self._inner.decompress(data or self._inner.unconsumed_tail, max_length))
        self.needs_input = not self._inner.unconsumed_tail and len(piece) < max_length
        return piece


def codings_of(headers: Iterable[str]) -> list[str]:
    """Return the codings of a body from its content-encoding headers, in the order in which they were applied. Raises
    UnsupportedMedia."""
    named = [name.strip().lower().removeprefix("x-") for name in ",".join(headers).split(",")]
    codings = [name for name in named if name not in ("", "identity")]
    accepted = ", ".join(CODINGS)
    for coding in codings:
        if coding not in CODINGS:
            reason = f"The content-encoding of a body must be one of {accepted}, got {coding[:80]!r}."
            raise UnsupportedMedia(reason, accepted)
    if len(codings) > MOST_CODINGS:
        raise UnsupportedMedia(f"A body must have at most {MOST_CODINGS} codings, got {len(codings)}.", accepted)
    return codings


def undoing(headers: Iterable[str]) -> Undo | None:
    """Return a function that decodes a body as `decoded` does, or None if the body has no coding. Raises
    UnsupportedMedia."""
    codings = codings_of(headers)
    if codings:
        return lambda body, limit_bytes, take: decoded(body, codings, limit_bytes, take)
    return None


def decoded(
    body: bytes | bytearray, codings: list[str], limit_bytes: int, take: Callable[[int], None]
) -> Generator[None, None, bytearray]:
    """Return the decoded body, in turns. `take` is called with the size of each piece, and may raise.

    Raises BodyTooLarge, and InvalidRequest if the body is not valid in its coding."""
    pieces: Iterator[bytes] = (bytes(body[at : at + _INPUT_BYTES]) for at in range(0, len(body), _INPUT_BYTES))
    for coding in reversed(codings):
        pieces = _without(coding, pieces, limit_bytes)
    whole = bytearray()
    turn_bytes = 0
    for piece in pieces:
        take(len(piece))
        whole += piece
        turn_bytes += max(len(piece), _LEAST_TURN_BYTES)
        if turn_bytes >= PIECE_BYTES:
            turn_bytes = 0
            yield
    return whole


class Decoding:
    """Decodes a body as it arrives. Its methods yield decoded pieces, and raise the errors of `decoded`."""

    def __init__(self, codings: list[str], limit_bytes: int) -> None:
        self._given = b""
        self._is_used = False  # All input has been decoded.
        self._has_ended = False
        pieces: Iterator[bytes] = self._source()
        for coding in reversed(codings):
            pieces = _without(coding, pieces, limit_bytes)
        self._pieces = pieces

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._given = data
        self._is_used = False
        for piece in self._pieces:
            if piece:
                yield piece
            if self._is_used and not self._has_ended:
                return

    def end(self) -> Iterator[bytes]:
        self._has_ended = True
        return self.feed(b"")

    def _source(self) -> Iterator[bytes]:
        """Yield the input, followed each time by an empty piece, which returns control to `feed`."""
        while True:
            data = self._given
            self._given = b""
            self._is_used = not data
            if self._is_used and self._has_ended:
                return
            yield data


def _without(coding: str, pieces: Iterator[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Yield the pieces with one coding removed. A body may have several gzip members or zstd frames."""
    decoder: _Decoder | None = None
    num_bytes = num_members = 0
    for data in pieces:
        if not data:
            yield data  # Empty pieces count towards a turn, too, so even very many do not block.
        while data:
            if decoder is None:
                if num_members and coding == "deflate":
                    raise InvalidRequest("The body has data after its end in deflate.")
                if num_members == MOST_MEMBERS:
                    raise InvalidRequest(f"The body has more than {MOST_MEMBERS} members in {coding}.")
                decoder = _decoder_of(coding, data)
                num_members += 1
            while True:
                try:
                    piece = decoder.decompress(data, PIECE_BYTES)
                except Exception as error:  # zlib and zstd raise different types.
                    raise InvalidRequest(f"The body is not valid {coding}: {error}.") from None
                num_bytes += len(piece)
                if num_bytes > limit_bytes:
                    raise BodyTooLarge(
                        f"The body is too large: it decodes from {coding} to more than {int(limit_bytes)} bytes."
                    )
                yield piece
                data = b""
                if decoder.eof:
                    data = decoder.unused_data
                    decoder = None
                    break
                if decoder.needs_input:
                    break
    if decoder is not None or not num_members:
        raise InvalidRequest(f"The body is cut off: its {coding} has no end.")


def _decoder_of(coding: str, start: bytes) -> _Decoder:
    if coding == "zstd":
        if sys.version_info >= (3, 14):
            from compression.zstd import DecompressionParameter, ZstdDecompressor
        else:
            from backports.zstd import DecompressionParameter, ZstdDecompressor
        return ZstdDecompressor(options={DecompressionParameter.window_log_max: _WINDOW_LOG})
    if coding == "gzip":
        return _Inflate(16 + zlib.MAX_WBITS)
    # In HTTP, deflate is zlib's format, but some clients send it bare.
    return _Inflate(zlib.MAX_WBITS if start[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS)


async def page_response(request: Request, content: bytes, content_type: str) -> Response:
    headers = {"content-type": content_type, "vary": "accept, accept-encoding"}
    accepted = qualities(",".join(request.headers.getlist("accept-encoding")))
    if accepted.get("gzip") or accepted.get("x-gzip"):
        content = await run_in_threadpool(gzip.compress, content, _GZIP_LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(content, headers=headers)


def qualities(accepted: str) -> dict[str, float]:
    """Return the quality of each value in an Accept header or a similar one. Malformed values are skipped."""
    found: dict[str, float] = {}
    for item in accepted.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weights = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
        with suppress(ValueError):
            found[name] = float(weights[0]) if weights else 1.0
    return found
