"""Finds what the layers of a model of transformers call attention with."""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import AttentionParameters
from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.reference import watched
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.check import NUM_TOKENS, batches


@torch.inference_mode()
def attention_parameters(loaded: LoadedModel, block_size: int) -> dict[int, AttentionParameters]:
    """Return what the layers of a model call attention with, by layer."""
    parameters: dict[int, AttentionParameters] = {}

    def record(layer: int, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        scaling, sliding_window, softcap, sinks, looks_ahead = scoring
        parameters[layer] = AttentionParameters(scaling, sliding_window, softcap, sinks is not None, looks_ahead)
        return key, value

    caches = EagerExecutor.with_cache(loaded, num_blocks=-(-NUM_TOKENS // block_size), block_size=block_size).caches
    EagerExecutor(loaded, caches, watched(caches, record)).forward(batches(loaded, block_size)[0])
    return parameters
