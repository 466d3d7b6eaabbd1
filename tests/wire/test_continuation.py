"""The gateway's splitting of streams at marks."""

import msgspec
import pytest

from oaiserve.wire.continuation import BEGUN, NOTHING, Piece, StreamSplitter, mark

STREAM = b"".join(
    (
        b'data: {"a": ": tokens [1,[2]]"}\n\n' + mark(BEGUN),
        b"event: x\ndata: : tokens [1,[2]]\n\n",
        mark(Piece(0, [7, 8])) + mark(NOTHING) + mark(Piece(1, [])),
        b"data: 2\n\n",
    )
)


@pytest.mark.parametrize("length", range(1, 30))
def test_cuts_of_the_network_change_nothing(length: int) -> None:
    splitter = StreamSplitter(is_marked=True)
    parts = [splitter.push(STREAM[start : start + length]) for start in range(0, len(STREAM), length)]
    assert [piece for _, pieces in parts for piece in pieces] == [BEGUN, Piece(0, [7, 8]), Piece(1, [])]
    assert splitter.rest == b"data: 2\n\n"
    sent = b"".join(part for part, _ in parts)
    assert sent == b'data: {"a": ": tokens [1,[2]]"}\n\nevent: x\ndata: : tokens [1,[2]]\n\n'


@pytest.mark.parametrize("length", range(1, 12))
def test_a_stream_without_marks_is_cut_behind_whole_events(length: int) -> None:
    splitter = StreamSplitter(is_marked=False)
    stream = b"data: 1\n\n: tokens [1]\n\ndata: 2\n"
    sent = b"".join(splitter.push(stream[at : at + length])[0] for at in range(0, len(stream), length))
    assert (sent, splitter.rest) == (b"data: 1\n\n: tokens [1]\n\n", b"data: 2\n")


def test_a_broken_mark_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        StreamSplitter(is_marked=True).push(b': tokens [1,"a"]\n\n')
