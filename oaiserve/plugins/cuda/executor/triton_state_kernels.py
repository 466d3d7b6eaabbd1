"""The device code of `triton_states`, which launches it and describes its arguments."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def recurrence_kernel(
    state,
    decay,
    key,
    value,
    query,
    rate,
    out,
    num_tokens,
    state_stride_sequence,
    state_stride_head,
    state_stride_key,
    state_stride_value,
    key_stride_sequence,
    key_stride_token,
    value_stride_sequence,
    value_stride_token,
    query_stride_sequence,
    query_stride_token,
    HAS_RATE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a key head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_KEY: tl.constexpr,  # at least KEY_DIM
    TILE_VALUE: tl.constexpr,
):
    """Compute some columns of a head's state for all tokens. The program is (tile of columns, head, sequence)."""
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, TILE_KEY)
    column = tl.program_id(0) * TILE_VALUE + tl.arange(0, TILE_VALUE)
    is_row = row < KEY_DIM
    is_column = column < VALUE_DIM
    numbers = state + sequence * state_stride_sequence + head * state_stride_head
    numbers += row[:, None] * state_stride_key + column[None, :] * state_stride_value
    is_number = is_row[:, None] & is_column[None, :]
    current = tl.load(numbers, mask=is_number, other=0.0).to(tl.float32)
    key += sequence * key_stride_sequence + head // GROUP * KEY_DIM + row
    query += sequence * query_stride_sequence + head // GROUP * KEY_DIM + row
    value += sequence * value_stride_sequence + head * VALUE_DIM + column
    first = sequence * num_tokens
    for token in range(num_tokens):
        own_key = tl.load(key, mask=is_row, other=0.0).to(tl.float32)
        own_query = tl.load(query, mask=is_row, other=0.0).to(tl.float32)
        added = tl.load(value, mask=is_column, other=0.0).to(tl.float32)
        key += key_stride_token
        query += query_stride_token
        value += value_stride_token
        of_head = (first + token) * HEADS + head
        current *= tl.load(decay + of_head)
        if HAS_RATE:
            added = (added - tl.sum(own_key[:, None] * current, 0)) * tl.load(rate + of_head)
        current += own_key[:, None] * added[None, :]
        read = tl.sum(own_query[:, None] * current, 0)
        tl.store(out + of_head * VALUE_DIM + column, read, mask=is_column)
    tl.store(numbers, current.to(state.dtype.element_ty), mask=is_number)
