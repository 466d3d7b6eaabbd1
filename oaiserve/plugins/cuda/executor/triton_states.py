"""The recurrence of layers with states as a Triton kernel: all tokens of a sequence in one launch."""

from __future__ import annotations

import triton
from torch import Tensor

from oaiserve.plugins.cuda.executor.launches import present, with_heads_in_one_piece
from oaiserve.plugins.cuda.executor.triton_state_kernels import recurrence_kernel

TILE_NUMBERS = 4096  # numbers of a state that one program computes


def recurrence(state: Tensor, decay: Tensor, key: Tensor, value: Tensor, query: Tensor, rate: Tensor | None) -> Tensor:
    """Do the same as `executors.reference.mixers.recurrence`, with the state in float32 between tokens."""
    num_sequences, num_tokens, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    key, query, value = (with_heads_in_one_piece(part) for part in (key, query, value))
    decay = decay.contiguous()
    out = value.new_empty(value.shape)
    tile_key = triton.next_power_of_2(key_dim)
    tile_value = min(triton.next_power_of_2(value_dim), max(1, TILE_NUMBERS // tile_key))
    recurrence_kernel[(-(-value_dim // tile_value), heads, num_sequences)](
        *(state, decay, key, value, query, present(rate, decay).contiguous(), out),
        num_tokens,
        *state.stride(),
        *(stride for part in (key, value, query) for stride in part.stride()[:2]),
        HAS_RATE=rate is not None,
        HEADS=heads,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILE_KEY=tile_key,
        TILE_VALUE=tile_value,
        num_warps=4,
    )
    return out
