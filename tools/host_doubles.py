"""Doubles of a device and of a model, for what measures the engine thread's time alone."""

from __future__ import annotations

from typing import Any

import torch

from oaiserve.engine.model.sampling.draw_rows import SampledIds
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence

BLOCK_SIZE = 16


class NoSampler:
    """Draws what has been drawn before."""

    def take_best(self, logits: torch.Tensor, out: SampledIds | None = None) -> SampledIds:
        assert out is not None
        return out

    def draw(self, *_: Any, out: SampledIds | None = None, **__: Any) -> SampledIds:
        assert out is not None
        return out


def make_spec() -> ModelSpec:
    return ModelSpec(
        name="double",
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=256,
        max_model_len=1 << 18,
        eos_token_ids=frozenset(),
        default_params={},
        kv_shapes={},
    )


def make_sequence(num_tokens: int, num_slots: int) -> Sequence:
    """Return a greedy sequence with blocks for `num_slots` tokens."""
    made = Sequence("r", 0, [0] * num_slots, SamplingParams(temperature=0.0), max_len=num_slots + 1)
    made.num_tokens = num_tokens
    made.blocks = list(range(-(-num_slots // BLOCK_SIZE)))
    return made
