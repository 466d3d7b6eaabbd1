"""Typical sizes of the numbers of keys. An 8-bit cache divides keys by them before it rounds.

Neighbours in a key share a scale, so a number that is always large costs the others precision. In some families, the
bias of the key projection or the weights of a norm produce numbers of 150 next to numbers of 1. The sizes follow from
the weights alone: without knowledge of the text, the projection's inputs are expected to be as large as the norm's
weights. The two numbers that are rotated together get the same size, because each takes the other's values at some
positions.

Sizes are powers of two, so keys and queries keep their precision, and only the rounding to integers changes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Attention, Decoder, Layer, Norm

_LEAST = 2.0**-16  # relative to the largest number of a head
# Sizes are raised to this power. With a power of 1, large numbers would lose too much precision. The divergence of
# Qwen2.5 0.5B at positions 16 to 511 is 0.0033 with the power 1, 0.0017 with 3/4, 0.0016 with 5/8, 0.0020 with 1/2,
# 0.0160 without sizes, and 0.0010 with a cache in bfloat16 (tools/quality of 79e07899).
_POWER = 0.625


def with_key_sizes(layer: Layer) -> Layer:
    """Return the layer with the sizes of the keys that it writes, if its cache has 8 bits."""
    attention = layer.attention
    if attention is None or not attention.shape.is_int8 or attention.cache_of is not None:
        return layer
    return replace(layer, attention=replace(attention, key_sizes=_sizes(attention, layer.attention_norm)))


def key_sizes(decoder: Decoder) -> dict[int, Tensor]:
    attention = ((index, layer.attention) for index, layer in enumerate(decoder.layers))
    return {
        index: layer_sizes.key_sizes
        for index, layer_sizes in attention
        if layer_sizes is not None and layer_sizes.key_sizes is not None
    }


def _sizes(attention: Attention, input_norm: Norm | None) -> Tensor:
    """Return the sizes float32 [kv_heads, key_dim] of keys, given the norm of the projections' input."""
    shape = attention.shape
    projected = _projected(attention, input_norm).view(shape.kv_heads, shape.key_dim)
    if attention.rotates_before_norms:
        sizes = _normed(_paired(projected, attention), attention.key_norm)
    else:
        sizes = _paired(_normed(projected, attention.key_norm), attention)
    relative = sizes / sizes.amax(-1, keepdim=True)
    return torch.exp2((_POWER * relative.nan_to_num(1.0).clamp(min=_LEAST).log2()).round())


def _projected(attention: Attention, input_norm: Norm | None) -> Tensor:
    """Return the sizes [rows] of the key projection's output, from its bias and the sizes of its inputs."""
    assert isinstance(attention.qkv, list)  # the latent cache never has 8 bits
    shape = attention.shape
    start = 0
    parts = []
    first = attention.heads * shape.key_dim
    end = (attention.heads + shape.kv_heads) * shape.key_dim
    for matrix in attention.qkv:  # The matrices' rows are in this order: queries, keys, values.
        rows = slice(max(first - start, 0), max(end - start, 0))
        start += len(matrix.weight)
        if rows.start >= len(matrix.weight) or rows.stop == 0:
            continue
        keys = matrix.picked(rows)
        if isinstance(keys.weight, Blocks):
            weight = keys.weight.expand()
        else:
            weight = keys.weight.float()
        if keys.bias is None:
            mean = torch.zeros(len(weight), dtype=torch.float32)
        else:
            mean = keys.bias.float()
        if input_norm is not None:
            if input_norm.bias is not None:
                mean = mean + weight @ input_norm.bias
            weight = weight * input_norm.weight
        parts.append((weight.square().sum(1) + mean.square()).sqrt())
    return torch.cat(parts)


def _normed(sizes: Tensor, norm: Norm | None) -> Tensor:
    """Return the sizes after a norm, which applies to each head or to all heads together."""
    if norm is None:
        return sizes
    normed = sizes.view(-1, len(norm.weight))
    normed = normed / normed.square().mean(-1, keepdim=True).sqrt() * norm.weight
    return torch.hypot(normed, torch.zeros(1, dtype=torch.float32) if norm.bias is None else norm.bias).view(
        sizes.shape
    )


def _paired(sizes: Tensor, attention: Attention) -> Tensor:
    """Return the sizes after rotation, which mixes the two numbers of a pair."""
    if attention.rotary is None:
        return sizes
    pairs = torch.arange(attention.rotary.cosines.shape[1])
    begin = attention.rotary_offset
    is_interleaved = attention.rotary.is_interleaved
    one = begin + (2 * pairs if is_interleaved else pairs)
    other = one + (1 if is_interleaved else attention.rotary.apart)
    both = torch.hypot(sizes[:, one], sizes[:, other])
    return sizes.index_copy(1, one, both).index_copy(1, other, both)
