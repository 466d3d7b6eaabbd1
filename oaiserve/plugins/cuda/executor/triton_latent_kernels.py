"""Attention over latent vectors in a paged cache, as Triton device code. `triton_latent` launches it.

A token has only one key: its latent vector of RANK numbers, followed by SHARED more. Its value is the latent vector. So
all heads attend to the same keys, each with a query of the same width. As with grouped heads, a row is one head of one
token, and a program reads each key once, as key and as value.
"""

import triton
import triton.language as tl

from oaiserve.plugins.cuda.executor.triton_attention_kernels import (
    MASKED,
    _blocks,
    _first_state,
    _load_rows,
    _part_of,
    _store_part,
    _tile,
    _turned,
)
from oaiserve.plugins.cuda.executor.triton_tiles import dot


@triton.jit(do_not_specialize=["num_decodes"])
def latent_write_kernel(
    query,  # [T, HEADS, OWN + SHARED]
    absorbed,  # [T, HEADS, RANK + SHARED]
    latent,  # [T, RANK]
    shared,  # [T, SHARED]
    slots,
    decode_slots,  # int64 [num_decodes]: slots of the first tokens, which are decodes, in a captured step with prompts
    cache,
    positions,
    cosines,  # float32 [positions, ROTARY_DIM / 2]
    sines,
    num_decodes,
    query_stride,
    latent_stride,
    shared_stride,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    RANK: tl.constexpr,
    SHARED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_SHARED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    APART: tl.constexpr,
):
    """Write a token's latent vector and rotated shared numbers into its slot, if it has one.

    The rotated numbers of its queries are written after those that the host absorbs. The program is (token).
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    rank = tl.arange(0, TILE_RANK)
    dim = tl.arange(0, TILE_SHARED)
    head = tl.arange(0, TILE_HEADS)
    query_rows = query + token * query_stride + head * (OWN + SHARED) + OWN
    turned = _turned(
        query_rows, head < HEADS, position, cosines, sines, query, 0.0, SHARED, TILE_SHARED, ROTARY_DIM, APART, False
    )
    out_rows = absorbed + (token * HEADS + head) * (RANK + SHARED) + RANK
    is_number = (head < HEADS)[:, None] & (dim < SHARED)[None, :]
    tl.store(out_rows[:, None] + dim[None, :], turned.to(absorbed.dtype.element_ty), mask=is_number)
    slot = tl.load(slots + token)
    if token < num_decodes:
        slot = tl.maximum(slot, tl.load(decode_slots + token))
    if slot >= 0:
        place = cache + slot * (RANK + SHARED)
        tl.store(place + rank, tl.load(latent + token * latent_stride + rank, mask=rank < RANK), mask=rank < RANK)
        one = tl.arange(0, 1)
        row = shared + token * shared_stride + one
        key = _turned(
            row, one == 0, position, cosines, sines, query, 0.0, SHARED, TILE_SHARED, ROTARY_DIM, APART, False
        )
        key = tl.reshape(key, [TILE_SHARED]).to(cache.dtype.element_ty)
        tl.store(place + RANK + dim, key, mask=dim < SHARED)


@triton.jit(do_not_specialize=["table_stride", "first_sequence"])
def latent_kernel(
    query,  # [T, HEADS, RANK + SHARED]
    out,  # [T, HEADS, RANK]
    partial,  # float32 [places, HEAD_TILES, TILE_ROWS, RANK]: the results of parts, if a tile has several
    log_weights,  # float32 [places, HEAD_TILES, TILE_ROWS]: log2 of the sum of weights of each of these results
    cache,
    items,  # as in the plan, which has tiles of heads for its key heads
    num_items,
    num_done,
    query_start,
    seq_lens,
    block_tables,
    table_rows,
    scale,
    first_sequence,
    query_stride,
    table_stride,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SHARED: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_SHARED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Attend for a tile of one sequence's tokens, for a tile of heads, to a part of the keys that it sees. The program
    is (item * tiles of heads).

    It is `prefill_kernel` for latent vectors. Decodes are tiles of one token.
    """
    HEAD_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    TILE_TOKENS: tl.constexpr = TILE_ROWS // TILE_HEADS
    DIM: tl.constexpr = RANK + SHARED
    head_tile = tl.program_id(0) % HEAD_TILES
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_TILES
    if number >= tl.load(num_items):
        return
    item = items + number * 5
    row = first_sequence.to(tl.int64) + tl.load(item)
    part = tl.load(item + 2)
    parts = tl.load(item + 3)
    first_token, num_tokens, first_position = _tile(item, row, query_start, seq_lens, TILE_TOKENS)

    rows = tl.arange(0, TILE_ROWS)
    token = rows // TILE_HEADS
    head = head_tile * TILE_HEADS + rows % TILE_HEADS
    is_row = (token < num_tokens) & (head < HEADS)
    position = first_position + token
    rank = tl.arange(0, TILE_RANK)
    shared = tl.arange(0, TILE_SHARED)
    query_rows = (query + (first_token + token) * query_stride + head * DIM)[:, None]
    q = _load_rows(query_rows + rank[None, :], is_row, rank, RANK, TILE_RANK, False)
    shared_q = _load_rows(query_rows + RANK + shared[None, :], is_row, shared, SHARED, TILE_SHARED, False)

    last = first_position + num_tokens
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // TILE_N * TILE_N
    tl.static_assert(ITEM_ALIGNMENT % TILE_N == 0)  # Every part except the last has whole tiles.
    first, last = _part_of(first, last, part, parts, ITEM_ALIGNMENT)

    acc, total, highest = _first_state(query, head, is_row, TILE_ROWS, TILE_RANK, False)
    table = block_tables + tl.load(table_rows + row) * table_stride
    key_token = first + tl.arange(0, TILE_N)
    block = _blocks(table, key_token, last, BLOCK_SIZE)
    for _ in range(first, last, TILE_N):
        next_block = _blocks(table, key_token + TILE_N, last, BLOCK_SIZE)  # loaded ahead, as in `_attend`
        is_token = key_token < last
        key_rows = (cache + (block * BLOCK_SIZE + key_token % BLOCK_SIZE) * DIM)[:, None]
        latent = _load_rows(key_rows + rank[None, :], is_token, rank, RANK, TILE_RANK, False)
        shared_key = _load_rows(key_rows + RANK + shared[None, :], is_token, shared, SHARED, TILE_SHARED, False)
        scores = dot(q, tl.trans(latent), tl.zeros([TILE_ROWS, TILE_N], tl.float32))
        scores = dot(shared_q, tl.trans(shared_key), scores) * scale
        is_visible = key_token[None, :] <= position[:, None]
        if WINDOW > 0:
            is_visible &= key_token[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_visible, scores, MASKED)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        acc = dot(weights.to(latent.dtype), latent, acc * decay[:, None])
        highest = new_highest
        block = next_block
        key_token += TILE_N

    is_last = True
    if parts > 1:
        place = tl.load(item + 4).to(tl.int64) * HEAD_TILES + head_tile
        done = num_done + (number - part) * HEAD_TILES + head_tile
        is_last, acc, total = _store_part(
            acc, total, highest, partial, log_weights, done, place, part, parts, HEAD_TILES, RANK, TILE_RANK
        )
    out_rows = out + ((first_token + token) * HEADS + head) * RANK
    tl.store(
        out_rows[:, None] + rank[None, :],
        acc / tl.where(total > 0.0, total, 1.0)[:, None],  # Padding sees no key.
        mask=is_row[:, None] & (rank < RANK)[None, :] & is_last,
    )
