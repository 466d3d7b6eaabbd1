"""Tests the frames of WebSocket: any pieces, messages in parts, and what breaks the protocol."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.plugins.responses.socket_frames import (
    Broken,
    CloseCode,
    Event,
    Opcode,
    Reader,
    accept_value,
    close_frame,
    frame,
)
from tests.plugins.responses.web_socket import masked


def events_of(pieces: Iterable[bytes]) -> list[Event]:
    """Return the events of pieces, with the parts of each message joined as far as nothing came between them."""
    reader = Reader()
    events: list[Event] = []
    for piece in pieces:
        reader.push(piece)
        while (event := reader.next()) is not None:
            if events and not events[-1].is_last and event.opcode < Opcode.CLOSE:
                events[-1] = Event(event.opcode, events[-1].data + event.data, event.is_last)
            else:
                events.append(event)
    return events


FRAMES = (
    masked(Opcode.TEXT, b"a" * 300, is_last=False)
    + masked(Opcode.CONTINUATION, b"", is_last=False)
    + masked(Opcode.CONTINUATION, "é".encode())
    + masked(Opcode.PING, b"now")
    + masked(Opcode.BINARY, bytes(range(256)) * 300)
    + masked(Opcode.TEXT, b"")
    + masked(Opcode.CLOSE, b"\x03\xe8bye")
)


@given(st.lists(st.integers(0, len(FRAMES)), max_size=20))
def test_frames_are_read_in_any_pieces(places: list[int]) -> None:
    ends = [*sorted(places), len(FRAMES)]
    pieces = [FRAMES[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert events_of(pieces) == [
        Event(Opcode.TEXT, b"a" * 300 + "é".encode()),
        Event(Opcode.PING, b"now"),
        Event(Opcode.BINARY, bytes(range(256)) * 300),
        Event(Opcode.TEXT, b""),
        Event(Opcode.CLOSE, b"\x03\xe8bye"),
    ]


def test_a_control_frame_may_come_within_a_message() -> None:
    parts = masked(Opcode.TEXT, b"a", is_last=False), masked(Opcode.PING, b""), masked(Opcode.CONTINUATION, b"b")
    assert events_of(parts) == [
        Event(Opcode.TEXT, b"a", is_last=False),
        Event(Opcode.PING, b""),
        Event(Opcode.TEXT, b"b"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\x01a",  # not masked
        b"\xc1\x81abcda",  # compressed, without an extension for it
        b"\x83\x80abcd",  # an unknown opcode
        masked(Opcode.PING, b"x" * 126),
        masked(Opcode.PING, b"", is_last=False),
        masked(Opcode.CONTINUATION, b"x"),
        masked(Opcode.TEXT, b"x", is_last=False) + masked(Opcode.TEXT, b"x"),
    ],
)
def test_what_breaks_the_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(Broken) as broken:
        events_of([data])
    assert broken.value.code is CloseCode.PROTOCOL_ERROR


def test_the_data_of_a_huge_frame_is_passed_on_as_it_comes() -> None:
    huge = b"\x82\xff" + (2**62).to_bytes(8) + bytes(4)  # with a mask of zeros
    assert events_of([huge, b"ab", b"c"]) == [Event(Opcode.BINARY, b"abc", is_last=False)]


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_frames_of_the_server_have_the_length_of_their_data(size: int) -> None:
    written = frame(Opcode.TEXT, b"x" * size)
    head = len(written) - size
    assert (written[0], head) == (0x81, 2 if size < 126 else 4 if size < 65536 else 10)
    assert int.from_bytes(written[1 if size < 126 else 2 : head]) == size


def test_handshake_and_close_are_those_of_the_standard() -> None:
    assert accept_value("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert close_frame(CloseCode.TOO_LARGE, "x" * 200) == b"\x88\x7d\x03\xf1" + b"x" * 123
