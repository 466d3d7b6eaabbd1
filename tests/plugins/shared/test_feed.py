"""The feed that all viewers share."""

import asyncio
import threading
from itertools import count

import pytest

from oaiserve.plugins.shared.feed import Feed
from tests.world.loop import World


async def test_viewers_share_each_message_and_without_viewers_none_is_made() -> None:
    numbers = count()
    threads = set()

    def render() -> bytes:
        threads.add(threading.get_ident())
        return str(next(numbers)).encode()

    feed = Feed(render, interval_seconds=0)
    for number in range(3):
        assert await asyncio.gather(*(feed.next() for _ in range(5))) == [str(number).encode()] * 5
    await asyncio.sleep(0.01)
    assert await feed.next() == b"3"
    await feed.close()
    assert threading.get_ident() not in threads


async def test_a_failure_reaches_the_viewers_and_the_next_viewer_starts_the_feed_again(world: World) -> None:
    answers = iter([ValueError("no"), b"yes"])

    def render() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    feed = Feed(render, interval_seconds=0)
    with pytest.raises(ValueError, match="no"):
        await feed.next()
    assert await feed.next() == b"yes"
    await feed.close()
