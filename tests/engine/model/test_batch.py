"""The tensors of a batch: their values, the ids that only the device has, and their layout in one copy."""

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.batch import ALIGNMENT, Batch, build_batch
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.model.media_prompts import sequence_with_media
from tests.engine.model.steps import CPU, sequence_of


def sequence(prompt: list[int], blocks: list[int], num_pending: int = 0) -> Sequence:
    one = sequence_of(prompt, blocks)
    one.num_tokens += num_pending
    return one


def a_step() -> tuple[Step, dict[Sequence, int]]:
    """Return a step, and the rows of ids that the step before draws.

    The step has a decode, a decode whose token the step before draws, a whole prompt, and the middle of another prompt.
    """
    known = sequence([1, 2, 3], [7])
    unknown = sequence([4, 5, 6, 7], [3, 9], num_pending=1)
    whole = sequence([8, 9, 10], [5])
    part = sequence(list(range(20, 32)), [1, 2, 4])
    step = Step([Chunk(known, 2, 1), Chunk(unknown, 4, 1), Chunk(whole, 0, 3), Chunk(part, 4, 6, max_draws=0)])
    return step, {whole: 0, unknown: 5}


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    fields = {name: getattr(batch, name) for name in Batch.__slots__}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def test_tokens_of_all_chunks_are_packed_in_one_row() -> None:
    step, drawn_rows = a_step()
    batch = build_batch(step, 4, CPU, drawn_rows)
    assert {name: tensor.tolist() for name, tensor in tensors_of(batch).items()} == {
        "input_ids": [3, 0, 8, 9, 10, 24, 25, 26, 27, 28, 29],
        "positions": [2, 4, 0, 1, 2, 4, 5, 6, 7, 8, 9],
        "slots": [30, 36, 20, 21, 22, 8, 9, 10, 11, 16, 17],
        "block_tables": [[7, 0, 0], [3, 9, 0], [5, 0, 0], [1, 2, 4]],
        "table_rows": [0, 1, 2, 3],
        "query_start": [0, 1, 2, 5, 11],
        "seq_lens": [3, 5, 3, 10],
        "logits_rows": [0, 1, 4],
        "unknown_rows": [1],
        "drawn_rows": [5],
    }
    assert (batch.num_decodes, batch.query_lens, batch.context_lens) == (2, [1, 1, 3, 6], [3, 5, 3, 10])
    assert (batch.sample_chunks, batch.prompt_rows) == ([0, 1, 2], [])


def test_all_tensors_are_aligned_parts_of_one_copy() -> None:
    step, drawn_rows = a_step()
    tensors = tensors_of(build_batch(step, 4, CPU, drawn_rows)).values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.storage_offset() % ALIGNMENT == 0 and tensor.is_contiguous() for tensor in tensors)


def test_drawn_rows_are_not_needed_if_all_ids_are_on_the_host() -> None:
    batch = build_batch(Step([Chunk(sequence([1, 2], [0]), 0, 2)]), 4, CPU)
    assert (len(batch.unknown_rows), len(batch.drawn_rows)) == (0, 0)


@pytest.mark.parametrize(("start", "count", "rows"), [(0, 2, [0, 1]), (2, 2, [1, 0]), (0, 4, [3, 0, 1, 2])])
def test_prompt_logprobs_need_the_logits_of_every_position_except_for_the_last(
    start: int, count: int, rows: list[int]
) -> None:
    prompt = sequence([1, 2, 3, 4], [0])
    prompt.wants_prompt_logprobs = True
    batch = build_batch(Step([Chunk(prompt, start, count, max_draws=int(start + count == 4))]), 4, CPU)
    assert batch.logits_rows.tolist() == rows  # the row that samples comes first
    assert batch.prompt_rows == [(0, len(batch.sample_chunks), len(rows) - len(batch.sample_chunks))]


def test_a_chunk_with_a_draft_has_its_tokens_and_a_row_behind_each_of_them() -> None:
    decode = sequence([1, 2, 3], [0])
    verified = sequence([5, 6, 7], [2, 3])
    step = Step([Chunk(decode, 2, 1), Chunk(verified, 2, 4, 4, (8, 9, 10))])
    batch = build_batch(step, 4, CPU)
    assert batch.input_ids.tolist() == [3, 7, 8, 9, 10]
    assert batch.positions.tolist() == [2, 2, 3, 4, 5]
    assert batch.slots.tolist() == [2, 10, 11, 12, 13]
    assert (batch.num_decodes, batch.query_lens, batch.context_lens) == (1, [1, 4], [3, 6])
    assert (batch.sample_chunks, batch.logits_rows.tolist()) == ([0, 1, 1, 1, 1], [0, 1, 2, 3, 4])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**30), has_axes=st.booleans(), has_runs=st.booleans())
def test_media_take_their_places_in_any_chunks(seed: int, has_axes: bool, has_runs: bool) -> None:
    """Each token is checked by itself: with a draft, after the prompt, and in the middle of an image."""
    rng = Random(seed)
    chunks: list[Chunk] = []
    expected: list[tuple[tuple[int, ...], list[list[float]], int]] = []  # positions, vectors and last of each token
    for i in range(rng.randint(1, 4)):
        kinds: dict[str, Any] = {"has_axes": has_axes, "has_runs": has_runs, "num_deep": 1}
        prompt_len = rng.randint(1, 40)
        num_more = rng.randrange(8)
        one = sequence_with_media(rng, prompt_len, num_more, range(20 * i, 20 * i + 20), hidden=2, **kinds)
        if rng.random() < 0.3:
            one = sequence_of(one.token_ids, one.blocks)
        inside = {j for run in one.media.runs for j in range(*run) if j + 1 < run[1]} if one.media else set()
        ends = [end for end in range(1, len(one.token_ids) + 1) if end - 1 not in inside]
        end = rng.choice(ends)
        draft = (1,) * rng.randrange(3) if end == len(one.token_ids) else ()
        start = rng.randrange(end)
        chunks.append(Chunk(one, start, end - start + len(draft), draft=draft))
    chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
    for sequence, start, num_tokens, *_ in chunks:
        for j in range(start, start + num_tokens):
            if (media := sequence.media) is None:
                expected.append(((j, j, j), [], j))
                continue
            is_prompt = j < sequence.prompt_len
            axes = [media.axes[axis * sequence.prompt_len + j] for axis in range(3)] if has_axes and is_prompt else []
            rows = [(e.vectors[row], e.deep[0][row]) for e in sequence.encoded for row in range(len(e.vectors))]
            vectors = [x.tolist() for x in rows[media.places.index(j)]] if j in media.places else []
            last = next((end - 1 for first, end in media.runs if first <= j < end), j)
            expected.append((tuple(axes) or (j + media.delta * (not is_prompt),) * 3, vectors, last))
    batch = build_batch(Step(chunks), 16, CPU)
    assert batch.positions.tolist() == [positions[0] for positions, _, _ in expected]
    if batch.axes is None:
        assert all(len(set(positions)) == 1 for positions, _, _ in expected)
    else:
        assert list(zip(*batch.axes.tolist(), strict=True)) == [positions for positions, _, _ in expected]
    lasts = [last for _, _, last in expected]
    own = [j for chunk in chunks for j in range(chunk.start, chunk.end)]
    assert (own if batch.last_visible is None else batch.last_visible.tolist()) == lasts
    with_vectors = {row: vectors for row, (_, vectors, _) in enumerate(expected) if vectors}
    vectors_by_row = {}
    if batch.media is not None:
        parts = (batch.media.rows, batch.media.vectors, *batch.media.deep)
        vectors_by_row = {row: list(vectors) for row, *vectors in zip(*(part.tolist() for part in parts), strict=True)}
    assert vectors_by_row == with_vectors
