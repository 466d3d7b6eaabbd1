"""Finds the scales of a KV cache in floats of eight bits (E4M3), from the keys and values of a rehearsal."""

from __future__ import annotations

import logging
import math
from typing import TypeVar

import torch
from torch import Tensor

from oaiserve.engine.model.attention import FP8_MAX, Scoring
from oaiserve.engine.model.attention.reference import watched
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.spec import LoadedModel

log = logging.getLogger(__name__)

T = TypeVar("T", bound=LoadedModel)

NUM_TOKENS = 64
# Keys of other texts may be larger than those of the rehearsal. What is larger still is cut off. A float keeps as many
# digits of small numbers, so the room costs nothing until they are 2^-15 of the largest.
ROOM = 4


@torch.inference_mode()
def with_measured_scales(loaded: T, block_size: int) -> T:
    """Return the model with a scale for the keys and one for the values of each layer: powers of two, such that the
    largest of a rehearsal is a fourth of what the cache can hold, or less."""
    plain = loaded.with_cache("auto")
    num_tokens = min(NUM_TOKENS, loaded.max_model_len)
    num_blocks = -(-num_tokens // block_size)
    largest: dict[int, tuple[float, float]] = {}
    caches = EagerExecutor.with_cache(plain, num_blocks=num_blocks, block_size=block_size).caches

    def record(layer: int, key: Tensor, value: Tensor, _: Scoring) -> tuple[Tensor, Tensor]:
        largest[layer] = float(key.abs().max()), float(value.abs().max())
        return key, value

    step = prompt(num_tokens, loaded.vocab_size, block_size)
    EagerExecutor(plain, caches, watched(caches, record)).forward(build_batch(step, block_size, loaded.device))
    keys, values = (max(found) for found in zip(*largest.values(), strict=True))
    log.info(
        "The KV cache is in FP8; the largest numbers of a rehearsal are %.3g in keys, %.3g in values", keys, values
    )
    return loaded.with_scales({layer: (scale_for(key), scale_for(value)) for layer, (key, value) in largest.items()})


def scale_for(largest: float) -> float:
    """Return the power of two that brings `largest` times `ROOM` into the range of the cache."""
    return 2.0 ** math.ceil(math.log2(largest * ROOM / FP8_MAX)) if 0 < largest < math.inf else 1.0
