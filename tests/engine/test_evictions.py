"""A prompt whose cached blocks were evicted has an event with the number of tokens, the time since, and the request."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Finished, Request, SamplingParams, TokenPrompt
from oaiserve.engine.scheduling.prefixes import Prefixes
from oaiserve.engine.sequences.blocks import EVICTIONS_PER_BLOCK, BlockPool, StatePool, hash_block
from oaiserve.engine.sequences.evictions import Evictions
from oaiserve.facts.lost_prefix import Eviction, LostPrefix
from oaiserve.facts.record import EventKind
from tests.engine.doubles import make_engine
from tests.engine.memory import sequence


def ask(engine: Engine, name: str, token_ids: list[int], **params: int) -> tuple[int, list[Mapping[str, int | str]]]:
    """Return the number of cached tokens of a prompt, and the details of its events `prefix_cache_lost`."""
    events = list(engine.stream(Request(name, [TokenPrompt(token_ids)], SamplingParams(max_tokens=1, **params))))
    end = events[-1]
    assert isinstance(end, Finished)
    lost = [event.details for event in end.account.events if event.kind is EventKind.PREFIX_CACHE_LOST]
    return end.usage.cached_tokens, lost


def test_a_lost_prefix_names_the_request_that_took_its_blocks() -> None:
    with make_engine(kv_blocks=8) as engine:
        assert ask(engine, "first", [1] * 17) == (0, [])
        assert ask(engine, "taker", [2] * 29) == (0, [])
        cached, (lost,) = ask(engine, "again", [1] * 17)
    assert cached + lost["tokens"] == 16
    assert lost["tokens"] > 0
    assert lost["evicted_for"] == "taker"
    assert lost["evicted_ns"] > 0


def test_a_prompt_that_was_never_computed_has_lost_nothing() -> None:
    with make_engine(kv_blocks=8) as engine:
        ask(engine, "first", [1] * 17)
        ask(engine, "taker", [2] * 29)
        assert ask(engine, "another", [3] * 17) == (0, [])


def test_a_prompt_with_another_beginning_has_lost_nothing() -> None:
    with make_engine(kv_blocks=32) as engine:
        ask(engine, "first", [1] * 17)
        assert ask(engine, "with another first token", [2] + [1] * 16) == (0, [])


def test_a_prompt_that_reads_no_cache_has_lost_nothing() -> None:
    with make_engine(kv_blocks=32) as engine:
        ask(engine, "first", [1] * 17)
        assert ask(engine, "with log-probabilities", [1] * 17, prompt_logprobs=0) == (0, [])


def test_evicted_blocks_are_counted_with_the_time_since_their_last_use() -> None:
    pool = BlockPool(2, 1)
    pool.at(1_000)
    blocks = pool.allocate(2)
    assert blocks is not None
    for number, block in enumerate(blocks):
        pool.publish(block, hash_block(None, [number]))
    pool.at(2_000)
    pool.release(blocks)
    pool.at(5_000)
    pool.release(pool.allocate(0, [blocks[0]]) or [])  # used once more
    pool.at(9_000)
    assert (pool.num_evicted, pool.evicted_unused_ns) == (0, 0)
    pool.allocate(2)
    assert (pool.num_evicted, pool.evicted_unused_ns) == (2, 7_000 + 4_000)


def test_an_engine_publishes_how_many_blocks_it_has_evicted() -> None:
    with make_engine(kv_blocks=8) as engine:
        ask(engine, "first", [1] * 17)
        assert engine.snapshot().num_evicted_blocks == 0
        engine.world.pause(1.0)
        ask(engine, "taker", [2] * 29)
        after = engine.snapshot()
    assert after.num_evicted_blocks > 0
    assert after.evicted_unused_ns > 0


def test_a_prompt_never_names_itself_as_the_request_that_took_its_blocks() -> None:
    pool = BlockPool(2, 1)
    prefixes = Prefixes(pool, StatePool(1), None)
    again = sequence("again", [1, 2, 3])
    for block, content in zip(pool.allocate(2) or (), prefixes.hashes(again), strict=False):
        pool.publish(block, content)
    pool.release([0, 1])
    pool.allocate(2, taker="again")
    assert prefixes.lost(again, 0) == LostPrefix(2, None)


def test_a_block_that_is_cached_again_is_not_lost() -> None:
    pool = BlockPool(2, 1)
    content = hash_block(None, [1])
    pool.publish(pool.allocate(1)[0], content)
    pool.release([0])
    pool.allocate(2, taker="taker")
    assert pool.evictions.find(content) == Eviction(0, "taker")
    pool.publish(1, content)
    assert pool.evictions.find(content) is None


@given(st.lists(st.integers(0, 9), max_size=60))
def test_only_the_latest_evictions_are_remembered(numbers: list[int]) -> None:
    evictions = Evictions(4)
    latest: list[int] = []
    for at, number in enumerate(numbers):
        evictions.note(bytes([number]), Eviction(at, "taker"))
        latest = [*(other for other in latest if other != number), number][-4:]
    assert len(evictions) == len(latest)
    assert all(evictions.find(bytes([number])) is not None for number in latest)


def test_the_memory_of_evictions_is_bounded_by_the_pool() -> None:
    pool = BlockPool(2, 1)
    for number in range(50):
        (block,) = pool.allocate(1)
        pool.publish(block, hash_block(None, [number]))
        pool.release([block])
    assert len(pool.evictions) == 2 * EVICTIONS_PER_BLOCK
