"""Rehearsal steps compute each kind of step before a GPU gets its first request."""

from itertools import product
from typing import Any

import torch

from oaiserve.engine.executors.reference.attention import PlainAttention
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.sampling.sampled_ids import SampledIds
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
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

    weights = CudaWeights(loaded.decoder, dtype=loaded.dtype, device=loaded.device)
    sizes = {"num_blocks": 1, "block_size": 1}
    executor = CudaExecutor(weights, loaded.kv_shapes, **sizes, kernels=Kernels(prepare_attention))
    runner = eager_runner(loaded, **sizes, executor=executor, sample_ids=sample_ids)
    for step in sampling_steps():
        runner.collect(runner.launch(step))
    assert ways == set(product(("best", "drawn", "cut"), (torch.bfloat16, torch.float32)))
    assert shapes == {(1, 2)}
