"""Steps that the device has no memory for: their parts, their joined results, and the size of later steps."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.oversized_steps import LEAST_TOKENS, RELIEF_NS, Shortage, compute_in_parts, copy_in_parts
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Logprobs, OutOfMemory, Step
from oaiserve.engine.types.media import PromptMedia
from tests.engine.memory import sequence


def step_of(*sizes: int) -> Step:
    """Return a step of chunks of these sizes, each inside its sequence. Every other one draws two tokens."""
    chunks = []
    for index, size in enumerate(sizes):
        one = sequence(f"{index}", 100)
        one.wants_prompt_logprobs = index % 3 == 0
        chunks.append(Chunk(one, 10, size, max_draws=2 * (index % 2 == 0)))
    return Step(chunks)


def results_of(step: Step) -> list[ChunkResult]:
    results = []
    for chunk in step.chunks:
        result = ChunkResult([chunk.end, chunk.end + 1]) if chunk.max_draws else ChunkResult()
        if chunk.sequence.wants_prompt_logprobs:
            result.prompt_logprobs = [Logprobs(p, -1.0, [], []) for p in range(chunk.start, chunk.end)]
        results.append(result)
    return results


def in_parts(
    step: Step, most_tokens: int, fits: Callable[[Step], bool]
) -> tuple[list[ChunkResult | None], list[list[Chunk]]]:
    """Return the results of a step that is computed in parts, and the chunks of each part that was tried."""
    tried = []

    def compute(part: Step) -> list[ChunkResult]:
        tried.append(part.chunks)
        if not fits(part):
            raise OutOfMemory
        return results_of(part)

    return compute_in_parts(compute, step, most_tokens), tried


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    room=st.integers(1, 120),
    most_tokens=st.integers(1, 120),
)
def test_the_results_of_parts_are_those_of_the_whole_step(sizes: list[int], room: int, most_tokens: int) -> None:
    step = step_of(*sorted(sizes))
    computed: dict[str, int] = {chunk.sequence.request_id: chunk.start for chunk in step.chunks}

    def compute(part: Step) -> list[ChunkResult]:
        assert part.num_tokens <= most_tokens, "known to be too much"
        if part.num_tokens > room:
            raise OutOfMemory
        ones = [chunk.num_tokens == 1 for chunk in part.chunks]
        assert ones == sorted(ones, reverse=True), "chunks of one token come first"
        for chunk in part.chunks:
            assert computed[chunk.sequence.request_id] == chunk.start, "in its order"
            computed[chunk.sequence.request_id] = chunk.end
        return results_of(part)

    assert compute_in_parts(compute, step, most_tokens) == results_of(step)
    assert computed == {chunk.sequence.request_id: chunk.end for chunk in step.chunks}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_only_a_chunk_that_does_not_fit_alone_has_no_result(sizes: list[int], data: st.DataObject) -> None:
    step = step_of(*sorted(sizes))
    stuck = data.draw(st.sets(st.sampled_from([chunk.sequence for chunk in step.chunks])))
    pairs = zip(step.chunks, results_of(step), strict=True)
    expected = [None if chunk.sequence in stuck else result for chunk, result in pairs]
    actual, _ = in_parts(step, step.num_tokens, lambda part: stuck.isdisjoint(chunk.sequence for chunk in part.chunks))
    assert actual == expected


def test_a_chunk_that_fits_only_in_part_has_no_result() -> None:
    results, tried = in_parts(step_of(4), 4, lambda part: part.chunks[0].end <= 12)
    assert results == [None]
    assert [(chunk.start, chunk.num_tokens) for (chunk,) in tried] == [(10, 4), (10, 2), (12, 2), (12, 1)]


@pytest.mark.parametrize(
    ("sizes", "most_tokens", "expected"),
    [
        ((1, 1, 1, 1, 20), 24, [[1, 1, 1, 1, 20], [1, 1, 1, 1], [20], [10], [10]]),
        ((1, 1, 20, 20), 20, [[1, 1], [20], [10], [10], [20], [10], [10]]),  # nothing larger is tried
    ],
)
def test_halves_have_about_as_many_tokens(sizes: tuple[int, ...], most_tokens: int, expected: list[list[int]]) -> None:
    _, tried = in_parts(step_of(*sizes), most_tokens, lambda part: part.num_tokens <= 16)
    assert [[chunk.num_tokens for chunk in chunks] for chunks in tried] == expected


def test_an_error_in_one_part_is_the_error_of_the_chunk() -> None:
    results = {2: ChunkResult(error="bad"), 3: ChunkResult([1])}
    (result,) = compute_in_parts(lambda part: [results[part.num_tokens]], step_of(5), 3)
    assert result == ChunkResult([1], error="bad")


@given(st.integers(2, 20), st.integers(1, 20))
def test_copies_are_made_once_and_in_their_order_however_few_fit_at_once(number: int, most: int) -> None:
    copies = [(i, i + 1) for i in range(number)]
    copied = []

    def copy(part: list[tuple[int, int]]) -> None:
        if len(part) > most:
            raise OutOfMemory
        copied.extend(part)

    assert copy_in_parts(copy, copies)
    assert copied == copies


def test_a_copy_that_does_not_fit_alone_ends_all_copying() -> None:
    tried = []

    def copy(part: list[tuple[int, int]]) -> None:
        tried.append(part)
        if (3, 4) in part:
            raise OutOfMemory

    assert not copy_in_parts(copy, [(1, 2), (3, 4), (5, 6), (7, 8)])
    assert tried == [[(1, 2), (3, 4)], [(1, 2)], [(3, 4)]]
    assert not copy_in_parts(copy, [(3, 4)])


def test_steps_are_half_as_large_after_each_shortage_and_grow_again_in_time() -> None:
    shortage = Shortage(512)
    assert (shortage.is_on, shortage.allows(step_of(512))) == (False, True)
    shortage.shrink(512, now_ns=5)
    assert (shortage.is_on, shortage.step_tokens, shortage.num_steps) == (True, 256, 1)
    assert [shortage.allows(step_of(256)), shortage.allows(step_of(257))] == [True, False]
    shortage.shrink(100, now_ns=6)
    assert (shortage.step_tokens, shortage.num_steps) == (50, 2)
    shortage.recover(now_ns=5 + RELIEF_NS)
    assert shortage.step_tokens == 50
    for number, tokens in enumerate((100, 200, 400, 512), 1):
        shortage.recover(now_ns=6 + number * RELIEF_NS)
        assert shortage.step_tokens == tokens
    assert (shortage.is_on, shortage.num_steps) == (False, 2)


@given(st.integers(1, 4096), st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 30)), max_size=20))
def test_steps_are_never_limited_to_nothing(most_tokens: int, shortages: list[tuple[int, int]]) -> None:
    shortage = Shortage(most_tokens)
    now_ns = 0
    for num_tokens, seconds in shortages:
        now_ns += seconds * 10**9
        shortage.shrink(min(num_tokens, most_tokens), now_ns)
        assert min(LEAST_TOKENS, most_tokens) <= shortage.step_tokens <= most_tokens
        shortage.recover(now_ns)


@given(st.integers(0, 12), st.integers(1, 12), st.integers(1, 25))
def test_no_part_ends_inside_an_image_whose_tokens_see_each_other(first: int, length: int, room: int) -> None:
    step = step_of(24)
    run = (10 + first, 10 + first + length)
    step.chunks[0].sequence.media = PromptMedia((), array("i"), runs=(run,))
    results, tried = in_parts(step, 24, lambda part: part.num_tokens <= room)
    computed = [chunk for (chunk,) in tried if chunk.num_tokens <= room]
    assert not any(run[0] < chunk.end < run[1] for chunk in computed)
    assert results == (results_of(step) if room >= length else [None])
    assert room < length or sum(chunk.num_tokens for chunk in computed) == 24
