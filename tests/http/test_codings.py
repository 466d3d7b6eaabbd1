"""Compressed bodies are decoded as they were sent, and bombs and damaged ones end early."""

import asyncio
import gzip
import os
import time
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from oaiserve.errors import APIError, BodyTooLarge, InvalidRequest, UnsupportedMedia
from oaiserve.http.codings import MOST_MEMBERS, PIECE_BYTES, Decoding, codings_of, decoded, page_response
from oaiserve.http.fair_turns import at_once


def bare_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


def streamed_zstd(body: bytes) -> bytes:
    """Compress as a stream: without its length, with a checksum, and in two frames with one to skip between them."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
    first = b"".join(compressor.compress(body[at : at + 10]) for at in range(0, 50, 10)) + compressor.flush()
    return first + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstd.compress(body[50:])


CODED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "members of gzip": ("gzip", lambda body: gzip.compress(body[:50]) + gzip.compress(b"") + gzip.compress(body[50:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "stored deflate": ("deflate", lambda body: zlib.compress(body, 0)),
    "zstd": ("zstd", zstd.compress),
    "zstd at level 19": ("zstd", lambda body: zstd.compress(body, 19)),
    "streamed zstd": ("zstd", streamed_zstd),
    "two": ("gzip, zstd", lambda body: zstd.compress(gzip.compress(body))),
    "three": ("identity,deflate , zstd,gzip", lambda body: gzip.compress(zstd.compress(zlib.compress(body)))),
}


def read(named: str, body: bytes, limit: int = 10**7) -> bytearray:
    return at_once(decoded(body, codings_of([named]), limit, lambda _: None))


def read_as_it_arrives(named: str, body: bytes, piece_bytes: int, limit: int = 10**7) -> bytes:
    decoding = Decoding(codings_of([named]), limit)
    found = bytearray()
    for start in range(0, len(body), piece_bytes):
        for piece in decoding.feed(body[start : start + piece_bytes]):
            found += piece
    return bytes(found + b"".join(decoding.end()))


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
@pytest.mark.parametrize("how", CODED)
def test_a_body_is_decoded_alike_as_it_arrives(how: str, piece_bytes: int) -> None:
    named, compress = CODED[how]
    body = os.urandom(1000) + bytes(10_000)
    assert read_as_it_arrives(named, compress(body), piece_bytes) == body
    with pytest.raises(BodyTooLarge):
        read_as_it_arrives(named, compress(body), piece_bytes, 10_999)
    if how != "bare deflate":
        with pytest.raises(InvalidRequest, match="cut off"):
            read_as_it_arrives(named, compress(body)[:-1], piece_bytes)


@pytest.mark.parametrize("how", CODED)
def test_a_body_in_a_coding_is_read_as_it_was(how: str) -> None:
    named, compress = CODED[how]

    @given(st.binary(max_size=200) | st.integers(0, 200_000).map(lambda number: os.urandom(100) * (number // 100)))
    def check(body: bytes) -> None:
        assert read(named, compress(body)) == body

    check()


@pytest.mark.parametrize("how", [how for how in CODED if how != "bare deflate"])
@pytest.mark.parametrize("kept", [0, 1, 0.5, -1])
def test_a_body_that_is_cut_off_is_refused(how: str, kept: float) -> None:
    named, compress = CODED[how]
    whole = compress(os.urandom(1000))
    with pytest.raises(InvalidRequest, match="cut off"):
        read(named, whole[: int(len(whole) * kept) if 0 < kept < 1 else int(kept)])


GZIP = gzip.compress(b"abc", mtime=0)


@pytest.mark.parametrize(
    ("named", "body"),
    [
        *(("gzip", body) for body in (b"no gzip", GZIP[:-5] + b"12345", GZIP + b"no more")),
        *(("deflate", body) for body in (b"x\0{}", zlib.compress(b"abc") + b"x")),
        *(("zstd", body) for body in (b"no zstd at all", zstd.compress(b"abc") + b"no more")),
    ],
)
def test_what_is_not_in_its_coding_is_refused(named: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=rf"(not valid|after its end in) {named}"):
        read(named, body)


def test_a_window_beyond_that_of_http_is_refused() -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    body = compressor.compress(b"abc") + compressor.flush()
    with pytest.raises(InvalidRequest, match="not valid zstd.*too much memory"):
        read("zstd", body)


def test_other_codings_are_refused_with_those_that_are_read() -> None:
    assert codings_of([]) == codings_of(["", " , identity"]) == []
    for named in ("br", "gzip, br", "compress", "x" * 500, "gzip,gzip,gzip,gzip"):
        with pytest.raises(UnsupportedMedia) as caught:
            codings_of([named])
        assert caught.value.headers() == {"accept-encoding": "zstd, gzip, deflate"}
        assert len(caught.value.message) < 200


ZEROS = bytes(2**26)
EMPTY_BLOCKS = b"\0\0\0\xff\xff"  # a deflate block that decodes to nothing
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {  # made by their tests, because it takes a second
    "gzip": ("gzip", lambda: gzip.compress(ZEROS)),
    "deflate": ("deflate", lambda: zlib.compress(ZEROS)),
    "zstd": ("zstd", lambda: zstd.compress(ZEROS)),
    "gzip in gzip": ("gzip, gzip", lambda: gzip.compress(gzip.compress(ZEROS))),
    "zstd in zstd": ("zstd, zstd", lambda: zstd.compress(zstd.compress(ZEROS))),
    "nothing, in gzip": ("deflate, gzip", lambda: gzip.compress(EMPTY_BLOCKS * 2**22)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_early(bomb: str) -> None:
    named, make = BOMBS[bomb]
    body = make()
    tracemalloc.start()
    with pytest.raises(BodyTooLarge, match="decodes from .* to more than 1000000 bytes"):
        read(named, body, 10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 10**6


@pytest.mark.parametrize("named", ["gzip", "zstd"])
def test_a_body_of_many_small_members_takes_little_time_and_no_turn_is_long(named: str) -> None:
    one = gzip.compress(b"") if named == "gzip" else zstd.compress(b"")
    work = decoded(one * (2**23 // len(one)), [named], 10**6, lambda _: None)
    turns = [time.thread_time()]
    with pytest.raises(InvalidRequest, match=f"more than {MOST_MEMBERS} members"):
        turns += (time.thread_time() for _ in work)
    assert turns[-1] - turns[0] < 5
    assert max(later - earlier for earlier, later in pairwise(turns)) < 0.1


def test_empty_members_of_an_outer_coding_are_decoded_in_many_turns() -> None:
    work = decoded(zstd.compress(b"") * 5000, ["gzip", "zstd"], 10**6, lambda _: None)
    num_turns = 0
    with pytest.raises(InvalidRequest, match="its gzip has no end"):
        for num_turns, _ in enumerate(work, start=1):  # noqa: B007
            pass
    assert num_turns > 5000 // 20


def test_bytes_are_counted_as_they_come() -> None:
    taken: list[int] = []

    def take(number: int) -> None:
        taken.append(number)
        if sum(taken) > 10 * PIECE_BYTES:
            raise APIError("no room")

    with pytest.raises(APIError, match="no room"):
        at_once(decoded(zstd.compress(ZEROS), ["zstd"], 10**9, take))
    assert sum(taken) <= 11 * PIECE_BYTES


@pytest.mark.parametrize(
    ("accepted", "is_read"),
    [
        *((accepted, True) for accepted in ("gzip", "GZIP;q=0.5", "br, gzip;q=1.0", "deflate,x-gzip")),
        *((accepted, False) for accepted in ("", "br", "gzip;q=0", "gzip; q=0.000", "identity")),
    ],
)
def test_who_reads_gzip(accepted: str, is_read: bool) -> None:
    request = Request({"type": "http", "headers": [(b"accept-encoding", accepted.encode())]})
    page = asyncio.run(page_response(request, b"page", "text/plain"))
    assert page.headers.get("content-encoding") == ("gzip" if is_read else None)
    assert page.body == (gzip.compress(b"page", 4, mtime=0) if is_read else b"page")
