"""The layout of keys and values for native attention, which reads them in place.

Within a block, the keys of sixteen tokens are interleaved, so that one instruction adds to sixteen scores. In bfloat16
and in 8 bits, numbers are also grouped into pairs, as the dot-product instruction reads them. In 8 bits, the scales of
sixteen tokens precede their numbers, so a copy of a block includes both. If all heads compute their keys and values
from one latent vector, only keys are stored: the vector, and the numbers shared by all keys.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.spec import KEY_GROUP, KVShape
from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.kv_cache import zeroed

LANES = 16  # numbers that native code reads at once; widths of activations, heads and blocks are multiples of it
MAX_HEAD_DIM = 512  # must match MAX_VALUE_DIM in src
MAX_LATENT_DIM = 576  # numbers cached for each token; must match MAX_KEY_DIM in src
MAX_LATENT_RANK = 512  # limit of the latent vector's numbers


def refuse_unless_it_fits(shapes: Iterable[KVShape], block_size: int) -> None:
    """Raise NotKnown if the layout does not support these shapes or this block size."""
    if block_size % LANES:
        raise NotKnown(f"the block size {block_size} is no multiple of {LANES}")
    for shape in shapes:
        for dim in () if shape.latent_dim else (shape.key_dim, shape.value_dim):
            if dim % LANES or dim > MAX_HEAD_DIM:
                raise NotKnown(f"its heads have {dim} numbers, which is no multiple of {LANES} up to {MAX_HEAD_DIM}")


def latent_dim(rank: int, shared: int, shape: KVShape) -> int:
    """Return the width of the vector that replaces a token's keys and values, or 0 if the layout can't hold it.

    It consists of the latent vector, with `rank` numbers, and the numbers `shared` by all heads' keys.
    """
    dims = (rank, shared, shape.key_dim - shared, shape.value_dim)
    fits = all(dim > 0 and dim % LANES == 0 for dim in dims)
    if fits and rank <= MAX_LATENT_RANK and rank + shared <= MAX_LATENT_DIM:
        return rank + shared
    return 0


def new_cache(shape: KVShape, dtype: torch.dtype, *, num_blocks: int, block_size: int) -> LayerCache:
    """Return the cache of one layer, filled with zeros.

    Keys are [num_blocks, kv_heads, block_size / 16, key_dim / pack, 16, pack] and values [num_blocks, kv_heads,
    block_size / pack, value_dim, pack], where pack is 2 for bfloat16 and 1 for float32. In 8 bits, both are bytes
    [num_blocks, kv_heads, block_size / 16, bytes of sixteen tokens]. Latent vectors are stored as the keys of a single
    head.
    """
    if shape.is_int8:
        panels = (num_blocks, shape.kv_heads, block_size // LANES)
        key_scales = 4 * -(-shape.key_dim // KEY_GROUP)
        return LayerCache(
            zeroed((*panels, LANES * (key_scales + shape.key_dim)), torch.int8),
            zeroed((*panels, LANES * (4 + shape.value_dim)), torch.int8),
        )
    pack = 2 if dtype == torch.bfloat16 else 1
    if shape.latent_dim:
        keys = (num_blocks, 1, block_size // LANES, shape.latent_dim // pack, LANES, pack)
        return LayerCache(zeroed(keys, dtype), torch.empty(num_blocks, 0, dtype=dtype))
    per_block = (num_blocks, shape.kv_heads)
    return LayerCache(
        zeroed((*per_block, block_size // LANES, shape.key_dim // pack, LANES, pack), dtype),
        zeroed((*per_block, block_size // pack, shape.value_dim, pack), dtype),
    )
