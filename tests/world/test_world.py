"""The world keeps its promises for some seeds, repeats a seed, and finds a fault. `python -m tests.world` has more."""

import asyncio

import pytest

from oaiserve.wire.continuation import Piece, StreamSplitter
from tests.world.client import WorldSocket
from tests.world.hour import live
from tests.world.loop import MOST_WAIT_SECONDS, START_SECONDS, Process, World
from tests.world.network import Network
from tests.world.serving import Place, seconds_until_midnight, staying


@pytest.mark.parametrize("seed", range(10))
def test_nothing_breaks_or_is_left(seed: int) -> None:
    assert not live(seed, 1200).wrong


def test_a_seed_has_the_same_trace_in_each_run() -> None:
    first = live(7, 1200, keeps_trace=True)
    second = live(7, 1200, keeps_trace=True)
    other = live(8, 1200)
    assert first.lines == second.lines
    assert first.trace == second.trace != other.trace
    assert len(first.lines) > 500


def test_a_stream_that_goes_on_one_token_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_one(splitter: StreamSplitter, part: bytes) -> tuple[bytes, list[Piece]]:
        done, pieces = push(splitter, part)
        return done, pieces[1:]

    push = StreamSplitter.push
    monkeypatch.setattr(StreamSplitter, "push", forgets_one)
    assert any("it differs from an undisturbed one" in text for seed in range(5) for text in live(seed).wrong)


def test_no_day_ends_within_a_test() -> None:
    place = Place()
    place.world.settle(seconds_until_midnight(place.world) - 10)
    for name in ("the first one waits for the next day", "the second one begins at once"):
        before_ns = place.world.unix_ns()
        with staying(place, name):
            assert seconds_until_midnight(place.world) > MOST_WAIT_SECONDS
            assert (place.world.unix_ns() - before_ns > 9e9) is ("waits" in name)


def test_garbage_with_an_open_connection_does_not_interrupt_the_task_that_collects_it(world: World) -> None:
    client = Process(world, "client", "10.0.0.1")
    server = Process(world, "server", "10.0.0.2")
    Network(world).listeners["10.0.0.2", 80] = (server, lambda end: end.attach(asyncio.Protocol()))
    connection = WorldSocket(world, client, "10.0.0.2", 80)
    response = [connection.makefile("rb")]
    connection.close()  # as httpx does, whose response is still open
    others: list[str] = []

    async def collect() -> None:
        world.create_task(other())
        response.clear()  # the finalizer closes the file, and with it the connection
        assert not others

    async def other() -> None:
        others.append("ran")

    world.run_until_complete(collect())
    world.settle()
    assert others == ["ran"]
    assert connection._transport.is_closing()


async def test_a_callback_cannot_run_the_world_a_second_time(world: World) -> None:
    with pytest.raises(AssertionError, match="within <WorldTask.*test_a_callback_cannot_run"):
        world.settle()


def test_others_run_while_a_worker_lets_time_pass(world: World) -> None:
    lines: list[str] = []

    def settling() -> None:
        world.settle(1.0)
        lines.append(f"settled after {world.now - START_SECONDS:.1f} s")

    world.later("other", 0.5, lambda: lines.append("other"))
    worker = world.begin(settling)
    world.wait_for(lambda: not worker.is_alive)
    assert lines == ["other", "settled after 1.0 s"]
