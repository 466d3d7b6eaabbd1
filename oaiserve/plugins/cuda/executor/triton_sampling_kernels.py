"""The device code of `triton_sampling`, which launches it and describes its arguments.

A *weight* is a token's probability divided by that of the likeliest token, so it is in [0, 1]. The bits of non-negative
floats, read as integers, have the same order as the floats. So a threshold is found bit by bit, without sorting a row.

`parameters` has a row of `width` numbers for each of DRAW_COLUMNS. Its alignment and its width depend on the number of
rows. Kernels are not specialised on these, so that no kernel is compiled again for another number.
"""

import triton
import triton.language as tl

from oaiserve.engine.model.sampling import sampled_ids
from oaiserve.engine.sequences import noise
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS

TEMPERATURE = tl.constexpr(DRAW_COLUMNS.index("temperature"))
MIN_P = tl.constexpr(DRAW_COLUMNS.index("min_p"))
TOP_K = tl.constexpr(DRAW_COLUMNS.index("top_k"))
TOP_P = tl.constexpr(DRAW_COLUMNS.index("top_p"))
NUM_FLOORS = tl.constexpr(8)
MOST_COUNT = tl.constexpr(sampled_ids.MOST_COUNT)
INFINITY_BITS = tl.constexpr(0x7F800000)
FACTOR_1 = tl.constexpr(noise.FACTOR_1)
FACTOR_2 = tl.constexpr(noise.FACTOR_2)
LEFT_OUT_BITS = tl.constexpr(64 - noise.NOISE_BITS)
TWICE = tl.constexpr(1 << noise.NOISE_BITS + 1)  # twice the number of values that the noise is made of


@triton.jit
def _ordered(logits):
    """Convert float32 logits to int32 in the same order, with -0.0 equal to 0.0, and NaN above infinity."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logits != logits, 0x7FFFFFFF, bits)


@triton.jit
def _store_best(best, row, chunk, num_chunks, x, token_id):
    """Store the highest number of a chunk and its lowest id as one number, with the former in the upper bits."""
    both = (_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)
    tl.store(best + row * num_chunks + chunk, tl.max(both, 0))


@triton.jit
def _best(best, row, num_chunks, TILE_CHUNKS: tl.constexpr):
    """Return the best of a row from the bests of its chunks, in the same format."""
    chunk = tl.arange(0, TILE_CHUNKS)
    return tl.max(tl.load(best + row * num_chunks + chunk, mask=chunk < num_chunks, other=-(2**63)), 0)


@triton.jit
def _edited_logits(logits, row, stride, token_id, vocab, edits, HAS_PENALTIES: tl.constexpr, HAS_MASKS: tl.constexpr):
    """Load logits of a row in float32, edited by its penalties and its mask, -infinity beyond the vocabulary.

    `edits` are the tensors of Penalties and of BitMasks, in their order, and the number of words of a mask.
    """
    counts, factors, count_rows, words, mask_rows, num_words = edits
    is_id = token_id < vocab
    x = tl.load(logits + row * stride + token_id, mask=is_id, other=float("-inf")).to(tl.float32)
    if HAS_PENALTIES:
        count_row = tl.load(count_rows + row)
        if count_row >= 0:
            count = tl.load(counts + count_row * vocab + token_id, mask=is_id, other=0).to(tl.int32)
            repetition = tl.load(factors + 3 * count_row)
            repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
            by_times = tl.load(factors + 3 * count_row + 1) * (count >> 1).to(tl.float32)
            by_presence = tl.load(factors + 3 * count_row + 2)
            x = tl.where(count > 0, repeated, x) - tl.where(count > 1, by_times + by_presence, 0.0)
    if HAS_MASKS:
        mask_row = tl.load(mask_rows + row)
        if mask_row >= 0:
            word = tl.load(words + mask_row * num_words + token_id // 32, mask=is_id, other=0)
            x = tl.where((word >> token_id % 32) & 1 != 0, x, float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["count_rows", "mask_rows"])
def best_of_chunk_kernel(
    logits,
    best,
    stride,
    vocab,
    counts,
    factors,
    count_rows,
    words,
    mask_rows,
    num_words,
    CHUNK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    """Find the best logit of a chunk. The program is (row, chunk)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    edits = (counts, factors, count_rows, words, mask_rows, num_words)
    x = _edited_logits(logits, row, stride, token_id, vocab, edits, HAS_PENALTIES, HAS_MASKS)
    _store_best(best, row, chunk, tl.num_programs(1), x, token_id)


@triton.jit(do_not_specialize_on_alignment=["count_rows"])
def best_kernel(
    best,
    scores,
    token_ids,
    are_finite,
    num_chunks,
    vocab,
    counts,
    count_rows,
    TILE_CHUNKS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):
    """Choose the id with the best score of a row's chunks, and check its highest logit. The program is (row).

    Count the id if the row has penalties. No other draw of a launch uses the same counts.
    """
    row = tl.program_id(0).to(tl.int64)
    bits = _best(best, row, num_chunks, TILE_CHUNKS) >> 32
    drawn = 0x7FFFFFFF - (_best(scores, row, num_chunks, TILE_CHUNKS) & 0x7FFFFFFF)
    tl.store(token_ids + row, drawn)
    tl.store(are_finite + row, (bits < INFINITY_BITS) & (bits > -INFINITY_BITS - 1))
    if HAS_PENALTIES:
        count_row = tl.load(count_rows + row)
        if count_row >= 0:
            place = counts + count_row * vocab + drawn
            tl.store(place, tl.minimum(tl.load(place).to(tl.int32) + 2, MOST_COUNT).to(tl.int16))


@triton.jit
def _highest(best, row, num_chunks, TILE_CHUNKS: tl.constexpr):
    """Return the highest logit of a row, float32."""
    bits = (_best(best, row, num_chunks, TILE_CHUNKS) >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, highest, temperature):
    return tl.div_rn(x - highest, temperature)


@triton.jit
def _floors():
    """Return the floors [NUM_FLOORS], weights from which on tokens are counted: 4**-1, 4**-2, ..., the least float."""
    index = tl.arange(0, NUM_FLOORS)
    exponent = tl.where(index < NUM_FLOORS - 1, 125 - 2 * index, 1)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_parameter(parameters, width, row, COLUMN: tl.constexpr):
    """Return a parameter of a row, float32."""
    return tl.load(parameters + COLUMN * width + row)


@triton.jit
def _is_cut(parameters, width, row, vocab):
    """Return whether top_k or top_p can exclude an id. A greedy draw, whose top_k is 1, doesn't need the search."""
    top_k = _load_parameter(parameters, width, row, TOP_K)
    top_p = _load_parameter(parameters, width, row, TOP_P)
    return (top_k != 1) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0))


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["parameters", "count_rows", "mask_rows"])
def weights_kernel(
    logits,
    best,  # int64 [R, num_chunks]
    parameters,
    width,
    masses,  # float32 [R, num_chunks]
    weights,  # float32 [R, vocab]
    floor_counts,  # int32 [R, num_chunks, NUM_FLOORS]
    floor_masses,  # float32 [R, num_chunks, NUM_FLOORS]
    stride,
    vocab,
    counts,
    factors,
    count_rows,
    words,
    mask_rows,
    num_words,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    """Compute a chunk's weights, their sum, and number and sum from each floor on. The program is (row, chunk).

    This kernel and the next two do nothing for a row from which neither top_k nor top_p can exclude an id.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if not _is_cut(parameters, width, row, vocab):
        return
    num_chunks = tl.num_programs(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    edits = (counts, factors, count_rows, words, mask_rows, num_words)
    logit = _edited_logits(logits, row, stride, token_id, vocab, edits, HAS_PENALTIES, HAS_MASKS)
    highest = _highest(best, row, num_chunks, TILE_CHUNKS)
    x = tl.exp(_scaled(logit, highest, _load_parameter(parameters, width, row, TEMPERATURE)))
    x = tl.where(x < _load_parameter(parameters, width, row, MIN_P), 0.0, x)
    place = row * num_chunks + chunk
    tl.store(masses + place, tl.sum(x, 0))
    tl.store(weights + row * vocab + token_id, x, mask=token_id < vocab)
    is_above = x[None, :] >= _floors()[:, None]
    floor = place * NUM_FLOORS + tl.arange(0, NUM_FLOORS)
    tl.store(floor_counts + floor, tl.sum(is_above.to(tl.int32), 1))
    tl.store(floor_masses + floor, tl.sum(tl.where(is_above, x[None, :], 0.0), 1))


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["parameters"])
def candidates_kernel(
    weights,
    masses,
    floor_counts,
    floor_masses,
    parameters,
    width,
    candidate_weights,  # float32 [R, vocab]
    candidate_ids,  # int32 [R, vocab]
    num_candidates,  # int32 [R]
    vocab,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Store the candidates of a chunk, the tokens for which top_k and top_p decide. The program is (row, chunk).

    These are the tokens from the highest floor with enough of them on, in the order of ids, after the candidates of
    earlier chunks.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    if not _is_cut(parameters, width, row, vocab):
        return
    top_k = _load_parameter(parameters, width, row, TOP_K)
    top_p = _load_parameter(parameters, width, row, TOP_P)
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
    counts = tl.sum(tl.where(floors[None, :] == floor, counts, 0), 1)

    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(weights + row * vocab + token_id, mask=token_id < vocab, other=0.0)
    is_candidate = x >= tl.sum(tl.where(floors == floor, _floors(), 0.0), 0)
    before = tl.sum(tl.where(chunks < chunk, counts, 0), 0)
    target = row * vocab + before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    tl.store(candidate_weights + target, x, mask=is_candidate)
    tl.store(candidate_ids + target, token_id, mask=is_candidate)
    if chunk == 0:
        tl.store(num_candidates + row, tl.sum(counts, 0))


@triton.jit
def _threshold(weights, num, goal, lowest, highest, OF_COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Return the highest weight from which on all weights reach the goal together.

    With OF_COUNTS the goal is their number, otherwise their sum. Each pass finds three bits: it counts, or adds up, the
    weights from each of eight pivots on. Common bits of the lowest and the highest weight take no pass. If
    there is no such weight, the result is not above the lowest.
    """
    pivot = tl.arange(0, 8)
    bits = 0
    common = tl.cast(lowest, tl.int32, bitcast=True)
    different = common ^ tl.cast(highest, tl.int32, bitcast=True)
    for digit in range(10):
        shift = 27 - 3 * digit
        if (different >> shift) == 0:
            bits += common & (7 << shift)
        else:
            pivots = (bits + (pivot << shift)).to(tl.float32, bitcast=True)
            reached = tl.zeros([8], tl.float32)
            for start in range(0, num, TILE):
                place = start + tl.arange(0, TILE)
                x = tl.load(weights + place, mask=place < num, other=-1.0)
                amount = tl.full([TILE], 1.0, tl.float32) if OF_COUNTS else x
                reached += tl.sum(tl.where(x[None, :] >= pivots[:, None], amount[None, :], 0.0), 1)
            is_enough = (reached >= goal) & (reached > 0.0)  # if the goal is 0, the highest weight reaches it
            bits += tl.max(tl.where(is_enough, pivot, 0), 0) << shift
    return tl.cast(bits, tl.float32, bitcast=True)


@triton.jit
def _cut(
    weights,
    num,
    goal,
    lowest,
    highest,
    last_weight,
    last_count,
    OF_COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the candidates that reach the goal together. Better ones come first; of equal ones, lower ids.

    Return the last candidate's weight, the number of candidates with that weight, and the sum of all weights up to
    there. It does not go beyond the `last_count` first candidates with `last_weight`.
    """
    weight = tl.maximum(_threshold(weights, num, goal, lowest, highest, OF_COUNTS, TILE), last_weight)
    mass = 0.0
    num_above = 0.0
    num_equal = 0.0
    for start in range(0, num, TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(weights + place, mask=place < num, other=-1.0)
        mass += tl.sum(tl.where(x > weight, x, 0.0), 0)
        num_above += tl.sum(tl.where(x > weight, 1.0, 0.0), 0)
        num_equal += tl.sum(tl.where(x == weight, 1.0, 0.0), 0)
    count = goal - num_above if OF_COUNTS else tl.ceil((goal - mass) / weight)
    at_most = tl.where(weight == last_weight, tl.minimum(last_count, num_equal), num_equal)
    count = tl.maximum(tl.minimum(count, at_most), 1.0)
    return weight, count, mass + count * weight


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["parameters"])
def cut_kernel(
    masses,
    parameters,
    width,
    candidate_weights,
    candidate_ids,
    num_candidates,
    last_weights,  # float32 [R]
    last_ids,  # int32 [R]
    vocab,
    num_chunks,
    TILE_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the last id within top_k and top_p, and its weight. The program is (row).

    Ids with a higher weight stay. Ids with the same weight stay up to the last id.
    """
    row = tl.program_id(0).to(tl.int64)
    if not _is_cut(parameters, width, row, vocab):
        return
    top_k = _load_parameter(parameters, width, row, TOP_K)
    top_p = _load_parameter(parameters, width, row, TOP_P)
    weights = candidate_weights + row * vocab
    token_ids = candidate_ids + row * vocab
    num = tl.load(num_candidates + row)
    lowest = float("inf")
    highest = 0.0
    for start in range(0, num, TILE):
        place = start + tl.arange(0, TILE)
        lowest = tl.minimum(lowest, tl.min(tl.load(weights + place, mask=place < num, other=float("inf")), 0))
        highest = tl.maximum(highest, tl.max(tl.load(weights + place, mask=place < num, other=0.0), 0))
    weight = lowest
    count = num.to(tl.float32)
    chunks = tl.arange(0, TILE_CHUNKS)
    mass = tl.sum(tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0), 0)
    if (top_k > 0) & (top_k < vocab):
        weight, count, mass = _cut(weights, num, top_k, lowest, highest, weight, count, True, TILE)
    if top_p < 1.0:
        weight, count, mass = _cut(weights, num, mass * top_p, lowest, highest, weight, count, False, TILE)

    # The last id is the `count`-th of those with this weight.
    last_id = 0
    num_equal = 0
    for start in range(0, num, TILE):
        place = start + tl.arange(0, TILE)
        is_equal = (tl.load(weights + place, mask=place < num, other=-1.0) == weight).to(tl.int32)
        is_last = (is_equal > 0) & (num_equal + tl.cumsum(is_equal, 0) == count.to(tl.int32))
        last_id += tl.sum(tl.load(token_ids + place, mask=is_last, other=0), 0)
        num_equal += tl.sum(is_equal, 0)
    tl.store(last_weights + row, weight)
    tl.store(last_ids + row, last_id)


@triton.jit
def _mix32(x):
    x ^= x >> 16
    x *= FACTOR_1
    x ^= x >> 15
    x *= FACTOR_2
    return x ^ (x >> 16)


@triton.jit
def _noise(seed, token_id):
    """Return `noise.noise` of ids, float32. Its bits are exactly those of `noise.noise_bits`."""
    first = (seed >> 32).to(tl.uint32)
    second = seed.to(tl.uint32)
    mixed = _mix32(token_id.to(tl.uint32))
    high = (mixed ^ first) * FACTOR_1
    high = ((high ^ (high >> 15)) + second) * FACTOR_2
    high ^= high >> 16
    low = _mix32((high + mixed) ^ second)
    # u and 1 - u are odd multiples of 2**-53. Both are computed from integers, since one may be too close to 1 for
    # float32.
    odd = (high.to(tl.int64) << (33 - LEFT_OUT_BITS)) + ((low >> LEFT_OUT_BITS).to(tl.int64) << 1) + 1
    rest = odd.to(tl.float32) / TWICE
    u = (-odd + TWICE).to(tl.float32) / TWICE
    # -log(u) of a rounded u, times a correction for the rounding when u is close to 1.
    waited = tl.where(u == 1.0, rest, -tl.log(u) * (rest / (1.0 - u)))
    return -tl.log(waited)


@triton.jit(
    do_not_specialize=["width"], do_not_specialize_on_alignment=["parameters", "seeds", "count_rows", "mask_rows"]
)
def scores_kernel(
    logits,
    best,
    parameters,
    width,
    seeds,  # int64 [R]
    weights,
    last_weights,
    last_ids,
    scores,  # int64 [R, num_chunks]
    stride,
    vocab,
    counts,
    factors,
    count_rows,
    words,
    mask_rows,
    num_words,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    """Find a chunk's best score: scaled logit plus noise, or a greedy draw's logit. The program is (row, chunk)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    token_id = chunk * CHUNK + tl.arange(0, CHUNK)
    edits = (counts, factors, count_rows, words, mask_rows, num_words)
    x = _edited_logits(logits, row, stride, token_id, vocab, edits, HAS_PENALTIES, HAS_MASKS)
    if _load_parameter(parameters, width, row, TOP_K) != 1:
        temperature = _load_parameter(parameters, width, row, TEMPERATURE)
        x = _scaled(x, _highest(best, row, num_chunks, TILE_CHUNKS), temperature)
        if _is_cut(parameters, width, row, vocab):
            weight = tl.load(weights + row * vocab + token_id, mask=token_id < vocab, other=0.0)
            last_weight = tl.load(last_weights + row)
            stays = (weight > last_weight) | ((weight == last_weight) & (token_id <= tl.load(last_ids + row)))
        else:
            stays = tl.exp(x) >= _load_parameter(parameters, width, row, MIN_P)
        x = tl.where(stays & (token_id < vocab), x + _noise(tl.load(seeds + row), token_id), float("-inf"))
    _store_best(scores, row, chunk, num_chunks, x, token_id)
