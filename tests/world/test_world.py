"""The world keeps its promises for some seeds, repeats a seed, and finds a fault. `python -m tests.world` has more."""

import pytest

from oaiserve.wire.continuation import Piece, StreamSplitter
from tests.world.hour import live


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
