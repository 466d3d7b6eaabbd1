"""The device code of `triton_sampling`, which launches it and describes its arguments.

A *weight* is a token's probability divided by that of the likeliest token, so it is in [0, 1]. The bits of non-negative
floats are ordered as the floats are. So a threshold is searched for bit by bit, and no row is sorted.

The alignment of the parameters depends on the number of rows. Kernels are not specialised on it, so that no kernel is
compiled again for another number.
"""

import triton
import triton.language as tl

NUM_FLOORS = tl.constexpr(8)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _ordered(logits):
    """Return int32 that are ordered as the float32 logits are, with -0.0 equal to 0.0, and NaN above infinity."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logits != logits, 0x7FFFFFFF, bits)


@triton.jit
def mask_kernel(logits, masks, stride, vocab, num_words, CHUNK: tl.constexpr):
    """Set the logits of a chunk to -infinity where the bit of their id is 0. The program is (mask, chunk).

    A mask is int32 [1 + num_words]: the row of the logits that it belongs to, and the bits, 32 in a word.
    """
    mask, chunk = masks + tl.program_id(0).to(tl.int64) * (1 + num_words), tl.program_id(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(mask + 1 + token_id // 32, mask=token_id < vocab, other=-1)
    is_banned = (word >> (token_id % 32)) & 1 == 0
    tl.store(logits + tl.load(mask).to(tl.int64) * stride + token_id, float("-inf"), mask=is_banned)


@triton.jit
def best_of_chunk_kernel(logits, best, stride, vocab, CHUNK: tl.constexpr):
    """Find the highest logit of a chunk and the lowest id that has it. The program is (row, chunk).

    Both are stored as one number, with the logit in the upper bits.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token_id, mask=token_id < vocab, other=float("-inf")).to(tl.float32)
    both = (_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)
    tl.store(best + row * tl.num_programs(1) + chunk, tl.max(both, 0))


@triton.jit
def best_kernel(best, token_ids, are_finite, num_chunks, TILE_CHUNKS: tl.constexpr):
    """Find the best id of a row among those of its chunks. The program is (row)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, TILE_CHUNKS)
    both = tl.load(best + row * num_chunks + chunk, mask=chunk < num_chunks, other=-(2**63))
    highest = tl.max(both, 0)
    bits = highest >> 32
    tl.store(token_ids + row, 0x7FFFFFFF - (highest & 0x7FFFFFFF))
    tl.store(are_finite + row, (bits < INFINITY_BITS) & (bits > -INFINITY_BITS - 1))


@triton.jit
def highest_kernel(logits, highest, stride, vocab, CHUNK: tl.constexpr):
    """Find the highest logit of a chunk. The program is (row, chunk)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token_id, mask=token_id < vocab, other=float("-inf")).to(tl.float32)
    tl.store(highest + row * tl.num_programs(1) + chunk, tl.max(x, 0))


@triton.jit
def _highest(highest, row, num_chunks, TILE_CHUNKS: tl.constexpr):
    chunk = tl.arange(0, TILE_CHUNKS)
    return tl.max(tl.load(highest + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")), 0)


@triton.jit
def _weights(logits, row, stride, token_id, vocab, highest, temperature, min_p):
    x = tl.load(logits + row * stride + token_id, mask=token_id < vocab, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x / temperature - highest / temperature)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def _floors():
    """Return the floors [NUM_FLOORS], weights from which on tokens are counted: 4**-1, 4**-2, ..., the least float."""
    index = tl.arange(0, NUM_FLOORS)
    exponent = tl.where(index < NUM_FLOORS - 1, 125 - 2 * index, 1)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "min_ps"])
def weights_kernel(
    logits,
    highest,  # float32 [R, num_chunks]
    temperatures,
    min_ps,
    masses,  # float32 [R, num_chunks]
    weights,  # float32 [R, vocab]
    floor_counts,  # int32 [R, num_chunks, NUM_FLOORS]
    floor_masses,  # float32 [R, num_chunks, NUM_FLOORS]
    stride,
    vocab,
    HAS_CUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Compute the sum of the weights of a chunk. The program is (row, chunk).

    With HAS_CUTS, it also stores the weights, and for each floor the number and the sum of the weights from it on.
    """
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _weights(
        logits, row, stride, token_id, vocab, _highest(highest, row, num_chunks, TILE_CHUNKS),
        tl.load(temperatures + row), tl.load(min_ps + row),
    )  # fmt: skip
    place = row * num_chunks + chunk
    tl.store(masses + place, tl.sum(x, 0))
    if HAS_CUTS:
        tl.store(weights + row * vocab + token_id, x, mask=token_id < vocab)
        is_above = x[None, :] >= _floors()[:, None]
        floor = place * NUM_FLOORS + tl.arange(0, NUM_FLOORS)
        tl.store(floor_counts + floor, tl.sum(is_above.to(tl.int32), 1))
        tl.store(floor_masses + floor, tl.sum(tl.where(is_above, x[None, :], 0.0), 1))


@triton.jit
def _is_cut(top_k, top_p, vocab):
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)


@triton.jit(do_not_specialize_on_alignment=["top_ks", "top_ps"])
def candidates_kernel(
    weights,
    masses,
    floor_counts,
    floor_masses,
    top_ks,  # float32; 0: all ids stay
    top_ps,
    candidate_weights,  # float32 [R, vocab]
    candidate_ids,  # int32 [R, vocab]
    num_candidates,  # int32 [R]
    vocab,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Store the tokens of a chunk that may stay after top_k and top_p: the candidates. The program is (row, chunk).

    They are in the order of ids, after those of the chunks before. They are the tokens from the highest floor on that
    leaves enough of them. If neither top_k nor top_p can exclude a token, nothing is stored.
    """
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if not _is_cut(top_k, top_p, vocab):
        return
    chunks = tl.arange(0, TILE_CHUNKS)
    floors = tl.arange(0, NUM_FLOORS)
    place = (row * num_chunks + chunks[:, None]) * NUM_FLOORS + floors[None, :]
    is_chunk = (chunks < num_chunks)[:, None]
    counts = tl.load(floor_counts + place, mask=is_chunk, other=0)
    mass = tl.sum(tl.load(floor_masses + place, mask=is_chunk, other=0.0), 0)
    total = tl.sum(tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0), 0)
    has_top_k = (top_k > 0) & (top_k < vocab)
    is_enough = tl.where(has_top_k, tl.sum(counts, 0) >= top_k, mass >= total * top_p)
    floor = tl.min(tl.where(is_enough, floors, NUM_FLOORS - 1), 0)

    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(weights + row * vocab + token_id, mask=token_id < vocab, other=0.0)
    is_candidate = x >= tl.sum(tl.where(floors == floor, _floors(), 0.0), 0)
    counts = tl.sum(tl.where(floors[None, :] == floor, counts, 0), 1)
    before = tl.sum(tl.where(chunks < chunk, counts, 0), 0)
    target = row * vocab + before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    tl.store(candidate_weights + target, x, mask=is_candidate)
    tl.store(candidate_ids + target, token_id, mask=is_candidate)
    if chunk == 0:
        tl.store(num_candidates + row, tl.sum(counts, 0))


@triton.jit
def _threshold(weights, num, goal, OF_COUNTS: tl.constexpr, IS_STRICT: tl.constexpr, TILE: tl.constexpr):
    """Return the highest weight such that all weights from it on reach the goal together, or 0 if there is none.

    With OF_COUNTS the goal is their number, otherwise their sum. With IS_STRICT they have to exceed the goal. Each pass
    finds three bits: it counts, or adds up, the weights from each of eight pivots on.
    """
    pivot = tl.arange(0, 8)
    bits = 0
    for digit in range(10):
        shift = 27 - 3 * digit
        pivots = (bits + (pivot << shift)).to(tl.float32, bitcast=True)
        reached = tl.zeros([8], tl.float32)
        for start in range(0, num, TILE):
            place = start + tl.arange(0, TILE)
            x = tl.load(weights + place, mask=place < num, other=-1.0)
            amount = tl.full([TILE], 1.0, tl.float32) if OF_COUNTS else x
            reached += tl.sum(tl.where(x[None, :] >= pivots[:, None], amount[None, :], 0.0), 1)
        is_enough = reached > goal if IS_STRICT else reached >= goal
        bits += tl.max(tl.where(is_enough, pivot, 0), 0) << shift
    return tl.cast(bits, tl.float32, bitcast=True)


@triton.jit
def _cut(
    weights, num, goal, last_weight, last_count, OF_COUNTS: tl.constexpr, IS_STRICT: tl.constexpr, TILE: tl.constexpr
):
    """Return how many candidates reach the goal together, best first, and of equals the lowest id first.

    The result is the last candidate's weight, the number of candidates with that weight, and the sum of all weights up
    to there. It does not go beyond the `last_count` first candidates with `last_weight`.
    """
    weight = tl.maximum(_threshold(weights, num, goal, OF_COUNTS, IS_STRICT, TILE), last_weight)
    mass, num_above, num_equal = 0.0, 0.0, 0.0
    for start in range(0, num, TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(weights + place, mask=place < num, other=-1.0)
        mass += tl.sum(tl.where(x > weight, x, 0.0), 0)
        num_above += tl.sum(tl.where(x > weight, 1.0, 0.0), 0)
        num_equal += tl.sum(tl.where(x == weight, 1.0, 0.0), 0)
    if OF_COUNTS:
        count = goal - num_above
    elif IS_STRICT:
        count = tl.floor((goal - mass) / weight) + 1.0
    else:
        count = tl.ceil((goal - mass) / weight)
    at_most = tl.where(weight == last_weight, tl.minimum(last_count, num_equal), num_equal)
    count = tl.maximum(tl.minimum(count, at_most), 1.0)
    return weight, count, mass + count * weight


@triton.jit
def _draw_from_best(weights, token_ids, num, total, top_k, top_p, uniform, TILE: tl.constexpr):
    """Draw from the candidates that stay after top_k and top_p, best first, and return the token id."""
    weight = float("inf")
    for start in range(0, num, TILE):
        place = start + tl.arange(0, TILE)
        weight = tl.minimum(weight, tl.min(tl.load(weights + place, mask=place < num, other=float("inf")), 0))
    count = num.to(tl.float32)
    mass = total
    if top_k > 0:
        weight, count, mass = _cut(weights, num, top_k, weight, count, True, False, TILE)
    if top_p < 1.0:
        weight, count, mass = _cut(weights, num, mass * top_p, weight, count, False, False, TILE)
    weight, count, _ = _cut(weights, num, mass * uniform, weight, count, False, True, TILE)

    # The drawn token is the `count`-th of those with this weight.
    drawn, num_equal = 0, 0
    for start in range(0, num, TILE):
        place = start + tl.arange(0, TILE)
        is_equal = (tl.load(weights + place, mask=place < num, other=-1.0) == weight).to(tl.int32)
        is_drawn = (is_equal > 0) & (num_equal + tl.cumsum(is_equal, 0) == count.to(tl.int32))
        drawn += tl.sum(tl.load(token_ids + place, mask=is_drawn, other=0), 0)
        num_equal += tl.sum(is_equal, 0)
    return drawn


@triton.jit(do_not_specialize_on_alignment=["temperatures", "min_ps", "uniforms", "top_ks", "top_ps"])
def draw_kernel(
    logits,
    highest,
    temperatures,
    min_ps,
    uniforms,
    masses,
    top_ks,
    top_ps,
    candidate_weights,
    candidate_ids,
    num_candidates,
    token_ids,  # int64 [R]
    are_finite,  # bool [R]
    stride,
    vocab,
    num_chunks,
    HAS_CUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw the token where the running sum of weights passes the row's uniform number times their total.

    The program is (row). The sum runs in the order of ids if all tokens stay, and best first if top_k or top_p is set.
    """
    row = tl.program_id(0).to(tl.int64)
    best = _highest(highest, row, num_chunks, TILE_CHUNKS)
    chunk = tl.arange(0, TILE_CHUNKS)
    mass = tl.load(masses + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    total = tl.sum(mass, 0)
    is_finite = total < float("inf")  # the sum is NaN if a logit is NaN or infinity, or if all are -infinity
    tl.store(are_finite + row, is_finite)
    if not is_finite:
        tl.store(token_ids + row, 0)
        return
    uniform = tl.load(uniforms + row)
    if HAS_CUTS:
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        if _is_cut(top_k, top_p, vocab):
            drawn = _draw_from_best(
                candidate_weights + row * vocab, candidate_ids + row * vocab, tl.load(num_candidates + row),
                total, tl.where(top_k < vocab, top_k, 0.0), top_p, uniform, TILE,
            )  # fmt: skip
            tl.store(token_ids + row, drawn.to(tl.int64))
            return
    # Sums of floats are rounded, so a drawn token must also have a weight above 0. If the sums do not reach the goal,
    # the last token with a weight above 0 is taken.
    ends = tl.cumsum(mass, 0)
    goal = uniform * tl.max(ends, 0)
    last_chunk = tl.max(tl.where(mass > 0.0, chunk, 0), 0)
    drawn_chunk = tl.min(tl.where((mass > 0.0) & (ends > goal), chunk, last_chunk), 0)
    goal -= tl.sum(tl.where(chunk == drawn_chunk, ends - mass, 0.0), 0)
    token_id = drawn_chunk * CHUNK + tl.arange(0, CHUNK)
    x = _weights(
        logits, row, stride, token_id, vocab, best, tl.load(temperatures + row), tl.load(min_ps + row)
    )  # fmt: skip
    last = tl.max(tl.where(x > 0.0, token_id, 0), 0)
    drawn = tl.min(tl.where((x > 0.0) & (tl.cumsum(x, 0) > goal), token_id, last), 0)
    tl.store(token_ids + row, drawn.to(tl.int64))
