"""Before a GPU serves anybody, each kind of step has been computed once."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from oaiserve.engine.model import sampler
from oaiserve.engine.model.attention import reference
from oaiserve.engine.model.load import prepare
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampler import Choice, row_parameters
from oaiserve.engine.model.warm_up import warm_up
from oaiserve.engine.sequence import Sequence
from tools.random_models import FAMILIES, random_model


def test_all_ways_to_choose_and_the_smallest_of_all_prompts_have_been_computed() -> None:
    loaded = prepare(random_model(FAMILIES["llama"], dtype=torch.bfloat16))
    ways: set[tuple[str, torch.dtype]] = set()
    shapes: set[tuple[int, ...]] = set()

    def choose(logits: torch.Tensor, sequences: list[Sequence]) -> Choice:
        if all(sequence.params.temperature == 0 for sequence in sequences):
            way = "best"
        else:
            way = "cut" if any(row_parameters(s).cuts(logits.shape[1]) for s in sequences) else "drawn"
        ways.add((way, logits.dtype))
        return sampler._choose(logits, sequences)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any, batch: Any, **rest: Any) -> Any:
        shapes.add(tuple(batch.query_lens))
        return reference.attend(query, key, value, cache, batch, **rest)

    warm_up(ModelRunner(loaded, num_blocks=1, block_size=1, backend=attend, choose=choose))
    assert ways == set(product(("best", "drawn", "cut"), (torch.bfloat16, torch.float32)))
    assert shapes == {(1, 2)}
