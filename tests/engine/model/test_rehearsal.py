"""Rehearsal steps compute each kind of step before a GPU gets its first request."""

from itertools import product
from typing import Any

import pytest
import torch

from oaiserve.engine.executors.cuda.kernels import PlainAttention
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.sampling.sampled_ids import SampledIds
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.start.compare import difference, tolerance
from tests.engine.model.runners import eager_runner
from tests.engine.model.sampling import plain_sampling
from tests.models.decoders import FAMILIES, random_model
from tests.models.described import described


def may_exclude_ids(row: DrawRow, vocab: int) -> bool:
    return not row.is_greedy and (0 < row.top_k < vocab or row.top_p < 1.0)


def test_rehearsal_steps_cover_all_ways_to_sample_and_the_smallest_prompt() -> None:
    loaded = described(random_model(FAMILIES["llama"], dtype=torch.bfloat16))
    ways: set[tuple[str, torch.dtype]] = set()
    shapes: set[tuple[int, ...]] = set()

    def sample_ids(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
        if all(row.is_greedy for row in rows):
            way = "best"
        else:
            way = "cut" if any(may_exclude_ids(row, logits.shape[1]) for row in rows) else "drawn"
        ways.add((way, logits.dtype))
        return plain_sampling.sample_ids(logits, rows)

    def prepare_attention(batch: Any) -> PlainAttention:
        shapes.add(tuple(batch.query_lens))
        return PlainAttention(batch)

    runner = eager_runner(loaded, num_blocks=1, block_size=1, backend=prepare_attention, sample_ids=sample_ids)
    for step in sampling_steps():
        runner.collect(runner.launch(step))
    assert ways == set(product(("best", "drawn", "cut"), (torch.bfloat16, torch.float32)))
    assert shapes == {(1, 2)}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.002), (torch.bfloat16, 1.2), (torch.float16, 1.2)])
def test_logits_that_differ_by_more_than_rounding_are_beyond_the_tolerance(dtype: torch.dtype, factor: float) -> None:
    logits = torch.linspace(-3, 3, 100)
    assert difference(logits * factor, logits) > tolerance(dtype)
    assert difference(logits.to(dtype), logits) < tolerance(dtype) / 10
    assert not difference(logits * torch.nan, logits) <= tolerance(dtype)
