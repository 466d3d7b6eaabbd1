"""The tables by which queries and keys are rotated, made from the settings of a model."""

from __future__ import annotations

import torch

from oaiserve.engine.decoder.description import NotKnown, RotaryTable
from oaiserve.engine.decoder.settings import Settings


def rotary_table(
    settings: Settings, length: int, *, layer_type: str | None = None, is_interleaved: bool = False
) -> RotaryTable:
    """Return the table for positions up to `length`, of layers of a type where types have tables of their own."""
    rope = settings["rope_parameters"]
    rope = rope if layer_type is None else rope[layer_type]
    if rope["rope_type"] != "default":
        raise NotKnown(f"its rotary embeddings are {rope['rope_type']}")
    dim = int(settings["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    angles = torch.arange(length).float()[:, None] * frequencies
    return RotaryTable(angles.cos(), angles.sin(), is_interleaved, dim // 2)
