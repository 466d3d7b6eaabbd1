"""A link carries frames of any size in order, never waits for the other side, and notices its end."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from threading import Thread

import pytest

from oaiserve.scale.front_ends.link import HandedOver, Link, hand_over
from tests.engine.doubles import TIMEOUT_SECONDS

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def frame(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


class End:
    """One end of a link, with what it has received."""

    def __init__(self, sock: socket.socket, **options: int) -> None:
        self.link = Link(sock, **options)
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost = asyncio.Event()

    def start(self) -> "End":
        self.link.start(self.received.put_nowait, self.lost.set)
        return self

    async def take(self) -> bytes:
        return await asyncio.wait_for(self.received.get(), TIMEOUT_SECONDS)


async def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    contents = [b"", b"a", b"b" * 3_000_000, b"c", b"d" * 400_000]
    one, other = End(pair[0]), End(pair[1])
    one.link.send(frame(b"before the start"))
    one.start()
    other.start()
    for content in contents:
        one.link.send(frame(content))
    assert [await other.take() for _ in range(6)] == [b"before the start", *contents]
    assert await asyncio.to_thread(one.link.flush, TIMEOUT_SECONDS)
    other.link.send(frame(b"back"))
    assert await one.take() == b"back"


async def test_any_number_of_threads_may_send(pair: Pair) -> None:
    one, other = (End(sock).start() for sock in pair)

    def send(name: int) -> None:
        for number in range(200):
            one.link.send(frame(bytes([name]) * (number + 1) * 20))

    threads = [Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    got: dict[int, list[int]] = {name: [] for name in range(4)}
    for _ in range(800):
        content = await other.take()
        assert content == content[:1] * len(content)
        got[content[0]].append(len(content))
    assert all(lengths == [20 * (number + 1) for number in range(200)] for lengths in got.values())


async def test_a_frame_may_come_in_any_pieces(pair: Pair) -> None:
    one = End(pair[0]).start()
    for byte in frame(b"abc") + frame(b"") + frame(b"d"):
        pair[1].send(bytes([byte]))
        await asyncio.sleep(0)
    assert [await one.take() for _ in range(3)] == [b"abc", b"", b"d"]


async def test_the_end_of_the_other_side_is_noticed_once(pair: Pair) -> None:
    one = End(pair[0]).start()
    pair[1].close()
    await one.lost.wait()
    assert one.link.is_lost
    one.link.send(frame(b"dropped"))
    assert await asyncio.to_thread(one.link.flush, 0)


async def test_a_side_that_does_not_read_is_given_up(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    one = End(pair[0], most_unsent_bytes=1_000_000).start()
    for _ in range(20):
        one.link.send(frame(b"x" * 100_000))
    await one.lost.wait()
    assert "wait for a process that does not read them" in caplog.text


async def test_a_side_that_makes_no_sense_is_given_up(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(content: bytes) -> None:
        raise ValueError("this is no message")

    link, lost = Link(pair[0]), asyncio.Event()
    link.start(refuse, lost.set)
    pair[1].send(frame(b"nonsense"))
    await lost.wait()
    assert "this is no message" in caplog.text


def test_connections_pass_with_the_addresses_of_their_clients(pair: Pair) -> None:
    dropped: list[str] = []
    channel = HandedOver(pair[1], dropped.append)
    channel.setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.accept()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in ("127.0.0.1", "fe80::1%eth0"):
            with socket.create_connection(server.getsockname()) as client:
                accepted, _ = server.accept()
                assert hand_over(pair[0], accepted, address)
                passed, (got, _) = channel.accept()
                with passed:
                    passed.send(b"hello")
                    assert (client.recv(5), got) == (b"hello", address)
    channel.close()
    with socket.socket() as other:
        assert not hand_over(pair[0], other, "127.0.0.1")
        assert other.fileno() != -1
    assert dropped == []
