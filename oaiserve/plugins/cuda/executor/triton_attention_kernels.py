"""The device code of the Triton backend. `attention.triton` launches it and describes its arguments.

A *tile* is the work that one program does at a time: some rows of queries against TILE_N tokens of the cache. A row is
one query head of one token. The heads that share a key head are rows of the same tile, so that its keys are read once
for all of them. Scores are in base 2 (scaling times log2(e)), because the hardware has an instruction for exp2.

Kernels are not specialised on values of a step, so that no kernel is compiled while a request waits.
"""

import triton
import triton.language as tl

from oaiserve.plugins.cuda.executor.triton_tiles import dot, to_float8

# The score of a masked key is below any other score, but finite. A row that sees no key of a tile gets meaningless
# weights, and the first key that it sees multiplies these by exp2(MASKED - score) = 0. With -inf the result would be
# NaN.
MASKED = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _turned(
    first,  # [R], offsets of the rows
    is_row,  # [R]
    position,  # the position of the token that all rows belong to
    cosines,  # float32 [positions, ROTARY_DIM / 2]
    sines,
    norm,  # float32 [DIM]
    epsilon,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # numbers that are rotated by position; 0: none
    APART: tl.constexpr,  # distance between the two numbers of a rotated pair; 1: they are neighbours
    HAS_NORM: tl.constexpr,
):
    """Load rows [R, TILE_DIM] of queries or keys of a token, normed and rotated, in float32."""
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < DIM
    is_number = is_row[:, None] & is_dim[None, :]
    x = tl.load(first[:, None] + dim[None, :], mask=is_number, other=0.0).to(tl.float32)
    scale = tl.full(first.shape, 1.0, tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)
        x = x * scale[:, None] * tl.load(norm + dim, mask=is_dim, other=0.0)[None, :]
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        if APART == 1:
            is_rotated = dim < ROTARY_DIM
            is_first = dim % 2 == 0
            pair = dim // 2
        else:
            is_first = dim < HALF
            is_rotated = is_first | ((dim >= APART) & (dim < APART + HALF))
            pair = tl.where(is_first, dim, dim - APART)
        partner = tl.where(is_first, dim + APART, dim - APART)
        partner = tl.where(is_rotated, partner, 0)
        # The same numbers again, in another order. They are in the SM's cache.
        other = tl.load(first[:, None] + partner[None, :], mask=is_number, other=0.0).to(tl.float32)
        if HAS_NORM:
            other = other * scale[:, None] * tl.load(norm + partner, mask=is_dim, other=0.0)[None, :]
        cosine = tl.load(cosines + position * HALF + pair, mask=is_rotated, other=1.0)
        sine = tl.load(sines + position * HALF + pair, mask=is_rotated, other=0.0)
        x = x * cosine[None, :] + other * tl.where(is_first, -sine, sine)[None, :]
    return x


@triton.jit
def _to_cache(numbers, scale, cache):
    """Return numbers as the cache stores them: divided by the layer's scale if the cache has 8 bits."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return to_float8(numbers.to(tl.float32) / scale, cache.dtype.element_ty)
    else:
        return numbers.to(cache.dtype.element_ty)


@triton.jit
def _turned_pairs(
    rows,  # [T, H], offsets of the rows of tokens and heads
    is_row,  # [T, H]
    position,  # [T]
    is_token,  # [T]
    cosines,
    sines,
    norm,
    epsilon,
    DIM: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    APART: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load rows of queries or keys, normed and rotated, like `_turned`, but each number only once.

    Return the first and the second numbers of all pairs, float32 [T, H, TILE_PAIRS], their offsets in memory, and masks
    of those that exist. Numbers that are not rotated are also paired.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    PAIRS: tl.constexpr = DIM // 2
    tl.static_assert((ROTARY_DIM == 0) | (APART == 1) | (APART == HALF) | (APART == PAIRS))
    tl.static_assert(2 * PAIRS == DIM)
    pair = tl.arange(0, TILE_PAIRS)
    if APART == 1:
        first_dim = 2 * pair
        second_dim = first_dim + 1
    elif ROTARY_DIM == 0 or APART == PAIRS:
        first_dim = pair
        second_dim = pair + PAIRS
    else:
        first_dim = tl.where(pair < HALF, pair, pair + HALF)
        second_dim = tl.where(pair < HALF, pair + APART, pair + PAIRS)
    is_number = is_row[:, :, None] & (pair < PAIRS)[None, None, :]
    first_place = rows[:, :, None] + first_dim[None, None, :]
    second_place = rows[:, :, None] + second_dim[None, None, :]
    first = tl.load(first_place, mask=is_number, other=0.0).to(tl.float32)
    second = tl.load(second_place, mask=is_number, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 2) + tl.sum(second * second, 2)) / DIM + epsilon)
        first_norm = tl.load(norm + first_dim, mask=pair < PAIRS, other=0.0)
        second_norm = tl.load(norm + second_dim, mask=pair < PAIRS, other=0.0)
        first = first * scale[:, :, None] * first_norm[None, None, :]
        second = second * scale[:, :, None] * second_norm[None, None, :]
    if ROTARY_DIM > 0:
        angle = position[:, None] * HALF + pair[None, :]
        is_rotated = is_token[:, None] & (pair < HALF)[None, :]
        cosine = tl.load(cosines + angle, mask=is_rotated, other=1.0)[:, None, :]
        sine = tl.load(sines + angle, mask=is_rotated, other=0.0)[:, None, :]
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    return first, second, first_dim, second_dim, is_number


@triton.jit(do_not_specialize=["first_token", "num_tokens"])
def write_kernel(
    query,
    key,
    value,
    slots,
    keys,
    values,
    key_scale,
    value_scale,
    positions,
    cosines,
    sines,
    query_norm,
    key_norm,
    epsilon,
    first_token,
    num_tokens,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KV_HEADS: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    APART: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Write the keys and values of a few tokens, of all heads, into their slots. The program is (tokens).

    If the layer has a rotation, keys are normed and rotated first, and so are the queries of the tokens, in place. A
    token without a slot is skipped. Its numbers are loaded anyway, because waiting for the slot first would take
    longer.
    """
    number = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token = number < num_tokens
    token = (first_token + number).to(tl.int64)
    slot = tl.load(slots + token, mask=is_token, other=-1)
    has_slot = (slot >= 0)[:, None, None]
    kv_head = tl.arange(0, TILE_KV_HEADS)
    is_kv_row = is_token[:, None] & (kv_head < KV_HEADS)[None, :]
    key_rows = key + token[:, None] * key_stride + kv_head[None, :] * KEY_DIM
    key_slots = keys + slot[:, None] * (KV_HEADS * KEY_DIM) + kv_head[None, :] * KEY_DIM
    value_dim = tl.arange(0, TILE_VALUE_DIM)[None, None, :]
    is_value = is_kv_row[:, :, None] & (value_dim < VALUE_DIM)
    value_rows = value + token[:, None] * value_stride + kv_head[None, :] * VALUE_DIM
    new_value = tl.load(value_rows[:, :, None] + value_dim, mask=is_value)
    if (ROTARY_DIM > 0) | HAS_NORMS:
        position = tl.load(positions + token, mask=is_token, other=0)
        head = tl.arange(0, TILE_HEADS)
        is_query_row = is_token[:, None] & (head < HEADS)[None, :]
        query_rows = query + token[:, None] * query_stride + head[None, :] * KEY_DIM
        first, second, first_dim, second_dim, is_number = _turned_pairs(
            query_rows, is_query_row, position, is_token, cosines, sines, query_norm, epsilon,
            KEY_DIM, TILE_KEY_DIM // 2, ROTARY_DIM, APART, HAS_NORMS,
        )  # fmt: skip
        first_key, second_key, _, _, is_key = _turned_pairs(
            key_rows, is_kv_row, position, is_token, cosines, sines, key_norm, epsilon,
            KEY_DIM, TILE_KEY_DIM // 2, ROTARY_DIM, APART, HAS_NORMS,
        )  # fmt: skip
        is_number &= has_slot
        is_key &= has_slot
        kind = query.dtype.element_ty
        tl.debug_barrier()  # all threads have read the queries by now
        tl.store(query_rows[:, :, None] + first_dim[None, None, :], first.to(kind), mask=is_number)
        tl.store(query_rows[:, :, None] + second_dim[None, None, :], second.to(kind), mask=is_number)
        key_places = key_slots[:, :, None]
        tl.store(key_places + first_dim[None, None, :], _to_cache(first_key, key_scale, keys), mask=is_key)
        tl.store(key_places + second_dim[None, None, :], _to_cache(second_key, key_scale, keys), mask=is_key)
    else:
        key_dim = tl.arange(0, TILE_KEY_DIM)[None, None, :]
        is_key = is_kv_row[:, :, None] & (key_dim < KEY_DIM)
        new_key = tl.load(key_rows[:, :, None] + key_dim, mask=is_key)
        tl.store(key_slots[:, :, None] + key_dim, _to_cache(new_key, key_scale, keys), mask=is_key & has_slot)
    value_slots = values + slot[:, None] * (KV_HEADS * VALUE_DIM) + kv_head[None, :] * VALUE_DIM
    tl.store(value_slots[:, :, None] + value_dim, _to_cache(new_value, value_scale, values), mask=is_value & has_slot)


@triton.jit
def _load_rows(pointers, is_row, dim, DIM: tl.constexpr, TILE_DIM: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Load `pointers` [R, TILE_DIM], with zeros beyond rows and dimensions. If nothing is beyond, no mask is used."""
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
    """Return the blocks of the tokens. Tokens from `last` on get block 0, but nothing of it is read."""
    return tl.load(table + token // BLOCK_SIZE, mask=token < last, other=0)


@triton.jit
def _first_state(sinks, head, is_row, ROWS: tl.constexpr, TILE_VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return the state of an online softmax before its first key. In some rows, a sink adds a key whose value is 0."""
    acc = tl.zeros([ROWS, TILE_VALUE_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], MASKED, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E  # as scores, in base 2
        total = tl.where(is_row, 1.0, total)
        highest = tl.where(is_row, sink, highest)
    return acc, total, highest


@triton.jit
def _attend(
    state,  # (weighted values [ROWS, TILE_VALUE_DIM], sum of weights [ROWS], highest score [ROWS]), all float32
    query,  # [ROWS, TILE_KEY_DIM]
    position,  # [ROWS]: the index of each row's token in its sequence; None: every row sees all of the range
    seen,  # [ROWS]: the index of the last token that each row sees
    first,
    last,  # the range is tokens first..last-1 of the sequence
    keys,  # the keys of this head
    values,  # the values of this head
    table,  # the block table of this sequence
    scale,
    softcap,
    HAS_ENDS: tl.constexpr,  # False: the range consists of whole tiles
    WINDOW: tl.constexpr,  # 0: there is no sliding window
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
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
        key_rows = keys + block * (BLOCK_SIZE * KV_HEADS * KEY_DIM) + offset * (KV_HEADS * KEY_DIM)
        key = _load_rows(key_rows[:, None] + key_dim[None, :], is_token, key_dim, KEY_DIM, TILE_KEY_DIM, not HAS_ENDS)
        if key.dtype == tl.float8e4nv:
            key = key.to(query.dtype)
        scores = dot(query, tl.trans(key), tl.zeros([query.shape[0], TILE_N], tl.float32)) * scale
        if HAS_SOFTCAP:
            # This is softcap * tanh(x), computed with exp2: `Scoring.scalars` prepares `scale` and `softcap` for it.
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
        if position is not None:
            is_visible = token[None, :] <= seen[:, None]
            if WINDOW > 0:
                is_visible &= token[None, :] > position[:, None] - WINDOW
            scores = tl.where(is_visible, scores, MASKED)
        elif HAS_ENDS:
            scores = tl.where(is_token[None, :], scores, MASKED)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        value_rows = values + block * (BLOCK_SIZE * KV_HEADS * VALUE_DIM) + offset * (KV_HEADS * VALUE_DIM)
        value = _load_rows(
            value_rows[:, None] + value_dim[None, :], is_token, value_dim, VALUE_DIM, TILE_VALUE_DIM, not HAS_ENDS
        )
        if value.dtype == tl.float8e4nv:
            value = value.to(query.dtype)
        acc = dot(weights.to(value.dtype), value, acc * decay[:, None])
        highest = new_highest
        block = next_block
        token += TILE_N
    return acc, total, highest


@triton.jit
def _up_to(number, ALIGNMENT: tl.constexpr):
    return (number + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@triton.jit
def _tiles(query_start, seq_lens, row, is_row, WINDOW: tl.constexpr, TILE_TOKENS: tl.constexpr):
    """Return how many tiles sequences have in a step, and how many tokens the last tile of each sees."""
    length = tl.load(query_start + row + 1, mask=is_row, other=0) - tl.load(query_start + row, mask=is_row, other=0)
    seen = tl.load(seq_lens + row, mask=is_row, other=0)
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW + TILE_TOKENS - 1)
    return ((length + TILE_TOKENS - 1) // TILE_TOKENS).to(tl.int32), seen.to(tl.int32)


@triton.jit(do_not_specialize=["first_sequence", "num_sequences", "num_wanted"])
def plan_kernel(
    query_start,
    seq_lens,
    items,  # int32 [num_items, 5]: the sequence, its tile, the part of the keys, the number of parts, and its place
    num_items,  # int32 [1]
    num_done,  # int32 [num_items, KV_HEADS]: for the first part of a tile, how many of its parts are finished
    first_sequence,
    num_sequences,
    num_wanted,
    WINDOW: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    ITEM_ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_KV_HEADS: tl.constexpr,
):
    """Cut the keys of tiles of prompts, or of decodes, which are tiles of one token, into parts, where there are fewer
    tiles than wanted. The program is (sequence).

    All tiles of a sequence have the same number of parts. There are at most `num_wanted` items more than tiles, and at
    most twice `num_wanted` in tiles of several parts, whose results have places.
    """
    query_start += first_sequence
    seq_lens += first_sequence
    total = tl.zeros([TILE], tl.int64)
    for begin in range(0, num_sequences, TILE):
        row = begin + tl.arange(0, TILE)
        tiles, seen = _tiles(query_start, seq_lens, row, row < num_sequences, WINDOW, TILE_TOKENS)
        total += tiles.to(tl.int64) * seen
    most = tl.maximum((tl.sum(total, 0) + num_wanted - 1) // num_wanted, LEAST_TOKENS)
    most = _up_to(most, ITEM_ALIGNMENT).to(tl.int32)

    sequence = tl.program_id(0)
    before = tl.zeros([TILE], tl.int32)
    placed = tl.zeros([TILE], tl.int32)
    for begin in range(0, sequence, TILE):
        row = begin + tl.arange(0, TILE)
        tiles, seen = _tiles(query_start, seq_lens, row, row < sequence, WINDOW, TILE_TOKENS)
        parts = tl.maximum((seen + most - 1) // most, 1)
        before += tiles * parts
        placed += tl.where(parts > 1, tiles * parts, 0)
    first_item = tl.sum(before, 0)
    first_place = tl.sum(placed, 0)

    tiles, seen = _tiles(query_start, seq_lens, sequence, sequence < num_sequences, WINDOW, TILE_TOKENS)
    parts = tl.maximum((seen + most - 1) // most, 1)
    kv_head = tl.arange(0, TILE_KV_HEADS)[None, :]
    for begin in range(0, tiles * parts, TILE):
        number = begin + tl.arange(0, TILE)
        is_item = number < tiles * parts
        item = items + (first_item + number) * 5
        tl.store(item, tl.zeros([TILE], tl.int32) + sequence, mask=is_item)
        tl.store(item + 1, number // parts, mask=is_item)
        tl.store(item + 2, number % parts, mask=is_item)
        tl.store(item + 3, tl.zeros([TILE], tl.int32) + parts, mask=is_item)
        tl.store(item + 4, first_place + number, mask=is_item)
        done = num_done + (first_item + number)[:, None] * KV_HEADS + kv_head
        is_done = is_item[:, None] & (kv_head < KV_HEADS)
        tl.store(done, tl.zeros([TILE, TILE_KV_HEADS], tl.int32), mask=is_done)
    if sequence == num_sequences - 1:
        tl.store(num_items, first_item + tiles * parts)


@triton.jit
def _tile(item, row, query_start, seq_lens, TILE_TOKENS: tl.constexpr):
    """Return an item's tile: its first token in the step, its number of tokens, and the position of the first."""
    begin = tl.load(query_start + row)
    length = (tl.load(query_start + row + 1) - begin).to(tl.int32)
    offset = tl.load(item + 1) * TILE_TOKENS
    first_position = tl.load(seq_lens + row).to(tl.int32) - length + offset
    return begin + offset, tl.minimum(length - offset, TILE_TOKENS), first_position


@triton.jit
def _part_of(first, last, part, parts, ITEM_ALIGNMENT: tl.constexpr):
    """Return the range of a part of the tokens first..last-1.

    All parts but the last have the same length, a multiple of ITEM_ALIGNMENT.
    """
    share = _up_to((last - first + parts - 1) // parts, ITEM_ALIGNMENT)
    begin = first + part * share
    return begin, tl.minimum(begin + share, last)


@triton.jit
def _store_part(
    acc,  # float32 [R, TILE_DIM]: the weighted values of a part of the keys
    total,  # float32 [R], the sum of its weights
    highest,  # float32 [R]
    partial,  # float32 [places, R, DIM]
    log_weights,  # float32 [places, R]
    done,  # how many parts have been computed
    place,  # where to store the result of this part
    part,
    parts,
    stride,  # distance between the places of two successive parts
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Store the result of a part. Return whether it is the last part to finish, and the result of all parts."""
    row = tl.arange(0, acc.shape[0])
    dim = tl.arange(0, TILE_DIM)[None, :]
    rows = place * acc.shape[0] + row
    weights = tl.where(total > 0.0, total, 1.0)  # A part of an early tile may have no visible key.
    tl.store(partial + rows[:, None] * DIM + dim, acc / weights[:, None], mask=(dim < DIM) & (total > 0.0)[:, None])
    tl.store(log_weights + rows, tl.where(total > 0.0, highest + tl.log2(weights), MASKED))
    # All threads of this program have stored their results before one of them counts the part, which publishes them.
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == parts - 1
    if is_last:
        tl.debug_barrier()
        tl.store(done, 0)  # for the next layer
        acc = tl.zeros_like(acc)
        total = tl.zeros_like(total)
        highest = tl.full([acc.shape[0]], MASKED, tl.float32)
        rows -= part * stride * acc.shape[0]
        for _ in range(parts):
            # These are read from the cache that all SMs share, because other programs have written them.
            log_weight = tl.load(log_weights + rows, cache_modifier=".cg")
            is_seen = log_weight > MASKED
            results = tl.load(
                partial + rows[:, None] * DIM + dim,
                mask=(dim < DIM) & is_seen[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            new_highest = tl.maximum(highest, log_weight)
            weight = tl.where(is_seen, tl.exp2(log_weight - new_highest), 0.0)
            decay = tl.exp2(highest - new_highest)
            acc = acc * decay[:, None] + results * weight[:, None]
            total = total * decay + weight
            highest = new_highest
            rows += stride * acc.shape[0]
    return is_last, acc, total


@triton.jit(do_not_specialize=["table_stride", "first_sequence"])
def prefill_kernel(
    query,
    out,
    partial,  # float32 [places, KV_HEADS, TILE_ROWS, VALUE_DIM]: the results of parts, if a tile has several
    log_weights,  # float32 [places, KV_HEADS, TILE_ROWS]: log2 of the sum of weights of each of these results
    keys,
    values,
    items,  # as in the plan
    num_items,
    num_done,
    query_start,
    seq_lens,
    block_tables,
    table_rows,
    last_visible,  # int64: see Batch
    scale,
    softcap,
    value_scale,
    sinks,
    first_sequence,
    query_stride,
    table_stride,
    LOOKS_AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Attend for a tile of one sequence's tokens and all heads of a key head. The program is (item * key heads).

    It covers a part of the keys that the tile sees. The last tiles come first: they see the most keys, and a long tile
    should not run alone at the end. The last of a tile's parts to finish combines the results.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    if number >= tl.load(num_items):
        return
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    item = items + number * 5
    row = first_sequence.to(tl.int64) + tl.load(item)
    part = tl.load(item + 2)
    parts = tl.load(item + 3)
    first_token, num_tokens, first_position = _tile(item, row, query_start, seq_lens, TILE_TOKENS)

    rows = tl.arange(0, TILE_ROWS)
    token = rows // GROUP
    is_row = token < num_tokens
    head = kv_head * GROUP + rows % GROUP
    key_dim = tl.arange(0, TILE_KEY_DIM)
    query_rows = query + (first_token + token) * query_stride + head * KEY_DIM
    q = _load_rows(query_rows[:, None] + key_dim[None, :], is_row, key_dim, KEY_DIM, TILE_KEY_DIM, False)
    position = first_position + token

    keys += kv_head * KEY_DIM
    values += kv_head * VALUE_DIM
    table = block_tables + tl.load(table_rows + row) * table_stride
    # The first part adds the sink.
    state = _first_state(sinks, head, is_row & (part == 0), TILE_ROWS, TILE_VALUE_DIM, HAS_SINKS)
    seen = position
    last = first_position + num_tokens
    if LOOKS_AHEAD:  # a token sees at least what earlier tokens see
        seen = tl.load(last_visible + first_token + token, mask=is_row, other=0)
        last = tl.load(last_visible + first_token + num_tokens - 1).to(tl.int32) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // TILE_N * TILE_N
    tl.static_assert(ITEM_ALIGNMENT % TILE_N == 0)  # Every part except the last has whole tiles.
    first, last = _part_of(first, last, part, parts, ITEM_ALIGNMENT)
    if WINDOW == 0:
        # Keys that every row sees need no mask, and these are most of a long context.
        border = tl.maximum(tl.minimum((first_position + 1) // TILE_N * TILE_N, last), first)
        state = _attend(
            state, q, None, None, first, border, keys, values, table, scale, softcap,
            False, 0, HAS_SOFTCAP, KV_HEADS, KEY_DIM, VALUE_DIM, TILE_KEY_DIM, TILE_VALUE_DIM, BLOCK_SIZE, TILE_N,
        )  # fmt: skip
        first = border
    acc, total, highest = _attend(
        state, q, position, seen, first, last, keys, values, table, scale, softcap,
        True, WINDOW, HAS_SOFTCAP, KV_HEADS, KEY_DIM, VALUE_DIM, TILE_KEY_DIM, TILE_VALUE_DIM, BLOCK_SIZE, TILE_N,
    )  # fmt: skip

    is_last = True
    if parts > 1:
        place = tl.load(item + 4).to(tl.int64) * KV_HEADS + kv_head
        done = num_done + (number - part) * KV_HEADS + kv_head
        is_last, acc, total = _store_part(
            acc, total, highest, partial, log_weights, done, place, part, parts, KV_HEADS, VALUE_DIM, TILE_VALUE_DIM
        )
    value_dim = tl.arange(0, TILE_VALUE_DIM)
    out_rows = out + ((first_token + token) * (KV_HEADS * GROUP) + head) * VALUE_DIM
    tl.store(
        out_rows[:, None] + value_dim[None, :],
        acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None],  # rows beyond the tokens may see no key
        mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :] & is_last,
    )


@triton.jit(do_not_specialize=["window", "table_stride"])
def decode_kernel(
    query,
    key,
    value,
    out,  # [B, heads, VALUE_DIM]
    partial,  # float32 [places, heads, VALUE_DIM]: the partial results of sequences that are split into several items
    log_weights,  # float32 [places, heads]: log2 of the sum of weights of each of these results
    keys,
    values,
    items,  # as in the plan
    num_items,
    num_done,
    slots,
    seq_lens,
    block_tables,
    table_rows,
    positions,
    cosines,
    sines,
    query_norm,
    key_norm,
    epsilon,
    scale,
    softcap,
    key_scale,
    value_scale,
    sinks,
    window,  # the most tokens that a query sees
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_KEYS: tl.constexpr,  # False: an earlier layer has written the step's keys
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_KEY_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_ITEMS: tl.constexpr,
    ITEM_ALIGNMENT: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    APART: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Compute attention of one token to the tokens of an item, for all query heads of a key head.

    The program is (key head, item). The program with the sequence's last token also writes that token's key and value
    into the cache. The last of a sequence's programs to finish combines the results. If the layer has a rotation, query
    and key are normed and rotated where they are read.
    """
    kv_head = tl.program_id(0)
    number = tl.program_id(1)
    if number >= tl.load(num_items):
        return
    item = items + number * 5
    sequence = tl.load(item).to(tl.int64)
    part = tl.load(item + 2)
    parts = tl.load(item + 3)
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    first, last = _part_of(tl.maximum(seq_len - window, 0), seq_len, part, parts, ITEM_ALIGNMENT)

    key_dim = tl.arange(0, TILE_KEY_DIM)
    value_dim = tl.arange(0, TILE_VALUE_DIM)
    keys += kv_head * KEY_DIM
    values += kv_head * VALUE_DIM
    slot = tl.load(slots + sequence)
    rows = tl.arange(0, TILE_ROWS)
    is_row = rows < GROUP
    head = kv_head * GROUP + rows
    query_rows = query + sequence * query_stride + head * KEY_DIM
    new_key_row = key + sequence * key_stride + kv_head * KEY_DIM
    is_turned: tl.constexpr = (ROTARY_DIM > 0) | HAS_NORMS
    if is_turned:
        position = tl.load(positions + sequence)
        q = _turned(
            query_rows, is_row, position, cosines, sines, query_norm, epsilon,
            KEY_DIM, TILE_KEY_DIM, ROTARY_DIM, APART, HAS_NORMS,
        ).to(query.dtype.element_ty)  # fmt: skip
    else:
        q = _load_rows(query_rows[:, None] + key_dim[None, :], is_row, key_dim, KEY_DIM, TILE_KEY_DIM, False)
    if (last == seq_len) & (slot >= 0) & HAS_KEYS:
        if is_turned:
            one = tl.arange(0, 1)
            new_key = _turned(
                new_key_row + one, one == 0, position, cosines, sines, key_norm, epsilon,
                KEY_DIM, TILE_KEY_DIM, ROTARY_DIM, APART, HAS_NORMS,
            )  # fmt: skip
            new_key = tl.reshape(new_key, [TILE_KEY_DIM])
        else:
            new_key = tl.load(new_key_row + key_dim, mask=key_dim < KEY_DIM)
        new_value_row = value + sequence * value_stride + kv_head * VALUE_DIM
        new_value = tl.load(new_value_row + value_dim, mask=value_dim < VALUE_DIM)
        key_slot = keys + slot * (KV_HEADS * KEY_DIM)
        value_slot = values + slot * (KV_HEADS * VALUE_DIM)
        tl.store(key_slot + key_dim, _to_cache(new_key, key_scale, keys), mask=key_dim < KEY_DIM)
        tl.store(value_slot + value_dim, _to_cache(new_value, value_scale, values), mask=value_dim < VALUE_DIM)
        # Other threads of this program read them below; no other program does.
        tl.debug_barrier()

    # The first part adds the sink.
    state = _first_state(sinks, head, is_row & (part == 0), TILE_ROWS, TILE_VALUE_DIM, HAS_SINKS)
    # There is only one loop, with masks: a second loop, just for the last tile, would wait for memory once more.
    acc, total, highest = _attend(
        state, q, None, None, first, last, keys, values, block_tables + tl.load(table_rows + sequence) * table_stride,
        scale, softcap,
        True, 0, HAS_SOFTCAP, KV_HEADS, KEY_DIM, VALUE_DIM, TILE_KEY_DIM, TILE_VALUE_DIM, BLOCK_SIZE, TILE_N,
    )  # fmt: skip

    # A padded row of a captured batch has no tokens: its result is zeros.
    result = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    is_number = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    heads: tl.constexpr = KV_HEADS * GROUP
    out_rows = out + (sequence * heads + head) * VALUE_DIM
    if parts == 1:
        tl.store(out_rows[:, None] + value_dim[None, :], result, mask=is_number)
    else:
        first_place = tl.load(item + 4).to(tl.int64) - part
        place = (first_place + part) * heads + head
        tl.store(partial + place[:, None] * VALUE_DIM + value_dim[None, :], result, mask=is_number)
        tl.store(log_weights + place, highest + tl.log2(total), mask=is_row)
        # All threads of this program have stored their results before one of them counts the part, which publishes
        # them.
        tl.debug_barrier()
        done = num_done + (number - part) * KV_HEADS + kv_head
        if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.debug_barrier()
            tl.store(done, 0)  # for the next layer
            for row in range(GROUP):
                _combine(
                    partial, log_weights, first_place, parts, heads, kv_head * GROUP + row,
                    out + (sequence * heads + kv_head * GROUP + row) * VALUE_DIM,
                    VALUE_DIM, TILE_VALUE_DIM, TILE_ITEMS,
                )  # fmt: skip


@triton.jit
def _combine(
    partial,
    log_weights,
    first,
    num_items,
    heads,
    head,
    out,
    VALUE_DIM: tl.constexpr,
    TILE_VALUE_DIM: tl.constexpr,
    TILE_ITEMS: tl.constexpr,
):
    """Combine the results of a sequence's items for a query head, weighted by their sums of weights."""
    value_dim = tl.arange(0, TILE_VALUE_DIM)
    is_dim = value_dim < VALUE_DIM
    highest = tl.full([], MASKED, tl.float32)
    total = 0.0
    acc = tl.zeros([TILE_VALUE_DIM], tl.float32)
    for begin in range(0, num_items, TILE_ITEMS):
        item = begin + tl.arange(0, TILE_ITEMS)
        is_item = item < num_items
        place = (first + item).to(tl.int64) * heads + head
        # These are read from the cache that all SMs share, because other programs have written them.
        log_weight = tl.load(log_weights + place, mask=is_item, other=MASKED, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(log_weight, 0))
        weight = tl.where(is_item, tl.exp2(log_weight - new_highest), 0.0)
        results = tl.load(
            partial + place[:, None] * VALUE_DIM + value_dim[None, :],
            mask=is_item[:, None] & is_dim[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        decay = tl.exp2(highest - new_highest)
        acc = acc * decay + tl.sum(results * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        highest = new_highest
    tl.store(out + value_dim, acc / total, mask=is_dim)
