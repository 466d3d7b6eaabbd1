"""The device code of the Triton backend. `attention.triton` launches it and describes its arguments.

A *tile* is the work that one program does at a time: some rows of queries against TILE_N tokens of the cache. A row is
one query head of one token. The heads that share a key head are rows of the same tile, so that its keys are read once
for all of them. Scores are in base 2 (scaling times log2(e)), because the hardware has an instruction for exp2.

Kernels are not specialised on values that differ from step to step, so that no kernel is compiled while a request
waits.
"""

import triton
import triton.language as tl

# The score of a masked key is below any other score, but finite. A row that sees no key of a tile gets meaningless
# weights, and the first key that it sees multiplies these by exp2(MASKED - score) = 0. With -inf the result would be
# NaN.
MASKED = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b, acc):
    """Return a @ b + acc in float32, without TF32."""
    if IS_INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["first_token"])
def write_kernel(
    key,
    value,
    slots,
    keys,
    values,
    first_token,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    keys_stride_slot,
    keys_stride_head,
    values_stride_slot,
    values_stride_head,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
):
    """Write the keys and values of one token, of all heads, into its slot. The program is (token)."""
    token = (first_token + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.arange(0, TILE_HEADS)[:, None]
        key_dim = tl.arange(0, TILE_KEY_DIM)[None, :]
        value_dim = tl.arange(0, TILE_VALUE_DIM)[None, :]
        is_key = (head < KV_HEADS) & (key_dim < KEY_DIM)
        is_value = (head < KV_HEADS) & (value_dim < VALUE_DIM)
        new_key = tl.load(key + token * key_stride_token + head * key_stride_head + key_dim, mask=is_key)
        new_value = tl.load(value + token * value_stride_token + head * value_stride_head + value_dim, mask=is_value)
        tl.store(keys + slot * keys_stride_slot + head * keys_stride_head + key_dim, new_key, mask=is_key)
        tl.store(values + slot * values_stride_slot + head * values_stride_head + value_dim, new_value, mask=is_value)


@triton.jit
def _load_rows(pointers, is_row, dim, DIM: tl.constexpr, TILE_DIM: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Load `pointers` [R, TILE_DIM], with zeros for rows and dimensions that do not exist.

    If all of them exist, the load has no mask.
    """
    if ALL_ROWS and DIM == TILE_DIM:
        return tl.load(pointers)
    elif ALL_ROWS:
        return tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
    elif DIM == TILE_DIM:
        return tl.load(pointers, mask=is_row[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=is_row[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def _blocks(table, token, last, BLOCK_SIZE: tl.constexpr):
    """Return the blocks of the tokens. Tokens from `last` on get block 0, of which nothing is read."""
    return tl.load(table + token // BLOCK_SIZE, mask=token < last, other=0)


@triton.jit
def _of_heads(numbers, head, is_row, other, HAS_NUMBERS: tl.constexpr):
    """Load a number of each row's head, for scores in base 2; `other` for rows that do not exist."""
    if HAS_NUMBERS:
        return tl.where(is_row, tl.load(numbers + head, mask=is_row, other=0.0) * LOG2_E, other)
    else:
        return tl.full(head.shape, 0.0, tl.float32)


@triton.jit
def _first_state(sink, ROWS: tl.constexpr, TILE_VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return the state of an online softmax before its first key. A sink is a key whose value is 0."""
    acc = tl.zeros([ROWS, TILE_VALUE_DIM], tl.float32)
    if HAS_SINKS:
        return acc, tl.where(sink > MASKED, 1.0, 0.0), sink
    else:
        return acc, tl.zeros([ROWS], tl.float32), tl.full([ROWS], MASKED, tl.float32)


@triton.jit
def _attend(
    state,  # (weighted values [ROWS, TILE_VALUE_DIM], sum of weights [ROWS], highest score [ROWS]), all float32
    query,  # [ROWS, TILE_KEY_DIM]
    position,  # [ROWS]: the position of each row's token in its sequence; None: every row sees all of the range
    first,
    last,  # the range is tokens first..last-1 of the sequence
    keys,  # the keys of this head
    values,  # the values of this head
    table,  # the block table of this sequence
    scale,
    softcap,
    slope,  # [ROWS], of each row's head
    origin,  # of the distances that are multiplied by the slopes; any position near the end of the sequence
    keys_stride_block,
    keys_stride_token,
    values_stride_block,
    values_stride_token,
    HAS_ENDS: tl.constexpr,  # False: the range consists of whole tiles
    WINDOW: tl.constexpr,  # 0: there is no sliding window
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Add a range of the cache to an online softmax, and return the new state."""
    acc, total, highest = state
    key_dim = tl.arange(0, TILE_KEY_DIM)
    value_dim = tl.arange(0, TILE_VALUE_DIM)
    token = first + tl.arange(0, TILE_N)
    block = _blocks(table, token, last, BLOCK_SIZE)
    for _ in range(first, last, TILE_N):
        # The blocks are loaded one tile ahead. If each iteration loaded its own, the compiler would spend its pipeline
        # stages on the table. One stage would be left for keys and values, which cannot overlap with anything.
        next_block = _blocks(table, token + TILE_N, last, BLOCK_SIZE)
        is_token = token < last
        offset = token % BLOCK_SIZE
        key_rows = keys + block * keys_stride_block + offset * keys_stride_token
        key = _load_rows(key_rows[:, None] + key_dim[None, :], is_token, key_dim, KEY_DIM, TILE_KEY_DIM, not HAS_ENDS)
        scores = _dot(query, tl.trans(key), tl.zeros([query.shape[0], TILE_N], tl.float32)) * scale
        if HAS_SOFTCAP:
            # This is softcap * tanh(x), computed with exp2: `Scoring.scalars` prepares `scale` and `softcap` for it.
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
        if HAS_SLOPES:
            scores += slope[:, None] * (token - origin)[None, :].to(tl.float32)
        if position is not None:
            is_visible = token[None, :] <= position[:, None]
            if WINDOW > 0:
                is_visible &= token[None, :] > position[:, None] - WINDOW
            scores = tl.where(is_visible, scores, MASKED)
        elif HAS_ENDS:
            scores = tl.where(is_token[None, :], scores, MASKED)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        value_rows = values + block * values_stride_block + offset * values_stride_token
        value = _load_rows(
            value_rows[:, None] + value_dim[None, :], is_token, value_dim, VALUE_DIM, TILE_VALUE_DIM, not HAS_ENDS
        )
        acc = _dot(weights.to(value.dtype), value, acc * decay[:, None])
        highest = new_highest
        block = next_block
        token += TILE_N
    return acc, total, highest


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query,
    out,
    keys,
    values,
    tiles,  # int32 [num_tiles, 4]: row of the block table, first token in `query`, number of tokens, first position
    block_tables,
    scale,
    softcap,
    sinks,
    slopes,
    query_stride_token,
    query_stride_head,
    out_stride_token,
    out_stride_head,
    keys_stride_block,
    keys_stride_token,
    keys_stride_head,
    values_stride_block,
    values_stride_token,
    values_stride_head,
    table_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute attention for a tile of tokens of one sequence, for all query heads of a key head.

    The program is (key head, tile).
    """
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    row = tl.load(tile).to(tl.int64)
    first_token = tl.load(tile + 1).to(tl.int64)
    num_tokens = tl.load(tile + 2)
    first_position = tl.load(tile + 3)

    rows = tl.arange(0, TILE_ROWS)
    token = rows // GROUP
    is_row = token < num_tokens
    head = kv_head * GROUP + rows % GROUP
    key_dim = tl.arange(0, TILE_KEY_DIM)
    query_rows = query + (first_token + token) * query_stride_token + head * query_stride_head
    q = _load_rows(query_rows[:, None] + key_dim[None, :], is_row, key_dim, KEY_DIM, TILE_KEY_DIM, False)
    position = first_position + token

    keys += kv_head * keys_stride_head
    values += kv_head * values_stride_head
    table = block_tables + row * table_stride
    slope = _of_heads(slopes, head, is_row, 0.0, HAS_SLOPES)
    state = _first_state(_of_heads(sinks, head, is_row, MASKED, HAS_SINKS), TILE_ROWS, TILE_VALUE_DIM, HAS_SINKS)
    last = first_position + num_tokens
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // TILE_N * TILE_N
    else:
        # Keys that every row sees need no mask, and these are most of a long context.
        first = (first_position + 1) // TILE_N * TILE_N
        state = _attend(
            state, q, None, 0, first, keys, values, table, scale, softcap, slope, last,
            keys_stride_block, keys_stride_token, values_stride_block, values_stride_token,
            False, 0, HAS_SOFTCAP, HAS_SLOPES, KEY_DIM, VALUE_DIM, TILE_KEY_DIM, TILE_VALUE_DIM, BLOCK_SIZE, TILE_N,
        )  # fmt: skip
    acc, total, _ = _attend(
        state, q, position, first, last, keys, values, table, scale, softcap, slope, last,
        keys_stride_block, keys_stride_token, values_stride_block, values_stride_token,
        True, WINDOW, HAS_SOFTCAP, HAS_SLOPES, KEY_DIM, VALUE_DIM, TILE_KEY_DIM, TILE_VALUE_DIM, BLOCK_SIZE, TILE_N,
    )  # fmt: skip

    value_dim = tl.arange(0, TILE_VALUE_DIM)
    out_rows = out + (first_token + token) * out_stride_token + head * out_stride_head
    tl.store(
        out_rows[:, None] + value_dim[None, :],
        acc / total[:, None],
        mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit
def _split_range(seq_len, split, num_splits, WINDOW: tl.constexpr, TILE_N: tl.constexpr):
    """Return which tokens a split reads: first..last-1.

    Splits have equal shares of the tokens that the query sees, in whole tiles. The last splits of a short sequence have
    no tokens (first >= last).
    """
    start = 0
    if WINDOW > 0:
        start = tl.maximum(seq_len - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(seq_len - start, num_splits), TILE_N) * TILE_N
    first = start + split * share
    return first, tl.minimum(first + share, seq_len)


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def decode_kernel(
    query,
    key,
    value,
    out,  # [B, heads, VALUE_DIM]; with splits, partial results in float32 [B, heads, num_splits, VALUE_DIM]
    log_weights,  # with splits: float32 [B, heads, num_splits], the log2 of the sum of weights of each split
    keys,
    values,
    slots,
    seq_lens,
    block_tables,
    scale,
    softcap,
    sinks,
    slopes,
    num_splits,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    out_stride_token,
    out_stride_head,
    keys_stride_block,
    keys_stride_token,
    keys_stride_head,
    values_stride_block,
    values_stride_token,
    values_stride_head,
    table_stride,
    HAS_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute attention of one token to the tokens of a split, for all query heads of a key head.

    The program is (key head, split, sequence). The one whose split has the sequence's last token also writes the key
    and value of that token into the cache.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    first, last = _split_range(seq_len, split, num_splits, WINDOW, TILE_N)
    if HAS_SPLITS:  # noqa: SIM102 # decided when the kernel is compiled
        # The reduction computes which splits have no tokens, and does not read their results, which are not written.
        if first >= last:
            return

    key_dim = tl.arange(0, TILE_KEY_DIM)
    value_dim = tl.arange(0, TILE_VALUE_DIM)
    keys += kv_head * keys_stride_head
    values += kv_head * values_stride_head
    slot = tl.load(slots + sequence)
    if (last == seq_len) & (slot >= 0):
        new_key = key + sequence * key_stride_token + kv_head * key_stride_head + key_dim
        new_value = value + sequence * value_stride_token + kv_head * value_stride_head + value_dim
        key_slot = keys + (slot // BLOCK_SIZE) * keys_stride_block + (slot % BLOCK_SIZE) * keys_stride_token
        value_slot = values + (slot // BLOCK_SIZE) * values_stride_block + (slot % BLOCK_SIZE) * values_stride_token
        tl.store(key_slot + key_dim, tl.load(new_key, mask=key_dim < KEY_DIM), mask=key_dim < KEY_DIM)
        tl.store(value_slot + value_dim, tl.load(new_value, mask=value_dim < VALUE_DIM), mask=value_dim < VALUE_DIM)
        # Other threads of this program read them below; no other program does.
        tl.debug_barrier()

    rows = tl.arange(0, TILE_ROWS)
    is_row = rows < GROUP
    head = kv_head * GROUP + rows
    query_rows = query + sequence * query_stride_token + head * query_stride_head
    q = _load_rows(query_rows[:, None] + key_dim[None, :], is_row, key_dim, KEY_DIM, TILE_KEY_DIM, False)
    slope = _of_heads(slopes, head, is_row, 0.0, HAS_SLOPES)
    # The first split has the sink.
    state = _first_state(
        _of_heads(sinks, head, is_row & (split == 0), MASKED, HAS_SINKS), TILE_ROWS, TILE_VALUE_DIM, HAS_SINKS
    )
    # There is one loop, with masks: a second loop, for the last tile alone, would wait for memory once more.
    acc, total, highest = _attend(
        state, q, None, first, last, keys, values, block_tables + sequence * table_stride,
        scale, softcap, slope, seq_len, keys_stride_block, keys_stride_token, values_stride_block, values_stride_token,
        True, 0, HAS_SOFTCAP, HAS_SLOPES, KEY_DIM, VALUE_DIM, TILE_KEY_DIM, TILE_VALUE_DIM, BLOCK_SIZE, TILE_N,
    )  # fmt: skip

    # A padded row of a captured batch has no tokens: its result is zeros.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_rows = out + sequence * out_stride_token + head * out_stride_head
    if HAS_SPLITS:
        out_rows += split * VALUE_DIM
        log_weight = log_weights + (sequence * (tl.num_programs(0) * GROUP) + head) * num_splits + split
        tl.store(log_weight, highest + tl.log2(total), mask=is_row)
    tl.store(out_rows[:, None] + value_dim[None, :], result, mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    partial,  # float32 [B, heads, num_splits, VALUE_DIM]
    log_weights,  # float32 [B, heads, num_splits]
    out,
    seq_lens,
    num_splits,
    out_stride_token,
    out_stride_head,
    WINDOW: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_N: tl.constexpr,  # the one of the decode kernel
):
    """Combine the results of all splits, each weighted by its sum of weights. The program is (head, sequence)."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    split = tl.arange(0, TILE_SPLITS)
    first, last = _split_range(seq_len, split, num_splits, WINDOW, TILE_N)
    has_tokens = (split < num_splits) & (first < last)
    place = (sequence * tl.num_programs(0) + head) * num_splits + split
    log_weight = tl.load(log_weights + place, mask=has_tokens, other=MASKED)
    weight = tl.where(has_tokens, tl.exp2(log_weight - tl.max(log_weight, 0)), 0.0)
    value_dim = tl.arange(0, TILE_VALUE_DIM)
    is_dim = value_dim < VALUE_DIM
    results = tl.load(
        partial + place[:, None] * VALUE_DIM + value_dim[None, :], mask=has_tokens[:, None] & is_dim[None, :], other=0.0
    )
    total = tl.sum(weight, 0)
    result = tl.sum(results * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + sequence * out_stride_token + head * out_stride_head + value_dim, result, mask=is_dim)
