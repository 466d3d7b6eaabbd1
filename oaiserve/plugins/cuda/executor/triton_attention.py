"""The Triton backend: paged attention for CUDA devices, and anywhere in Triton's interpreter (TRITON_INTERPRET=1).

Every choice is made from numbers on the host; nothing is read back. The grid of a decode step depends only on its
number of rows: its programs work through a plan, a list of items, which a kernel computes from the lengths on the
device. So the step can be captured in a CUDA graph, and replayed for sequences of any lengths. A padded row has seq_len
0 and slot -1: nothing is written for it, and its result is zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from oaiserve.engine.model.attention import LayerCache, Rotation, Scoring
from oaiserve.engine.model.batch import Batch
from oaiserve.plugins.cuda.executor.launches import num_multiprocessors, present, with_heads_in_one_piece
from oaiserve.plugins.cuda.executor.triton_attention_kernels import (
    decode_kernel,
    plan_kernel,
    prefill_kernel,
    write_kernel,
)

LEAST_ITEM_TOKENS = 512  # combining the results of smaller items takes longer than they save
ITEM_ALIGNMENT = 128  # tokens; a multiple of what a program reads at once
PLANNED_AT_A_TIME = 256  # sequences that a program of the plan reads at once, and items that it writes at once
COMBINED_AT_A_TIME = 16  # items whose results are combined at once
NO_WINDOW = 1 << 30  # tokens: longer than any sequence
WRITE_NUMBERS = 4096  # a program norms and rotates this many numbers of queries or keys at once, but at least one token

DECODE_BYTES = 32 << 10  # the keys and values of wide heads that a program of the decode kernel loads at once
LARGE_SM_BYTES = 160 << 10  # shared memory of a multiprocessor that holds several of the decode kernel's larger tiles
RESERVED_BYTES = 1024  # shared memory that a multiprocessor reserves for each program, besides the program's own
LEAST_TOKENS = 16  # lower bound of a tile's tokens: tensor cores multiply no fewer


class Card(NamedTuple):
    """The properties of a card that tiles depend on."""

    shared_bytes: int  # the memory that one program may share among its threads
    sm_bytes: int  # the memory that all programs of a multiprocessor share
    is_hopper: bool


HOPPER = Card(227 << 10, 228 << 10, is_hopper=True)
AMD = Card(64 << 10, 64 << 10, is_hopper=False)  # MI300; it reports Hopper's major capability


class Tile(NamedTuple):
    """The tile that a program of an attention kernel computes at a time, with its warps and pipeline stages."""

    rows: int  # tokens times the query heads that share a key head
    tokens: int  # tokens of the KV cache
    num_warps: int
    num_stages: int  # stages of the loop's software pipeline, which loads ahead


class TritonAttention:
    """The attention of one step by Triton kernels. Sums are in float32. With a rotation, queries may be overwritten."""

    rotates = True

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._plans = Plans(batch)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: LayerCache,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        batch = self._batch
        query = with_heads_in_one_piece(query)
        if key is not None and value is not None:
            key = with_heads_in_one_piece(key)
            value = with_heads_in_one_piece(value)
        out = query.new_empty(*query.shape[:2], cache.values.shape[3])
        num_decodes = batch.num_decodes
        has_prefills = num_decodes < len(batch.query_lens)
        if has_prefills and key is not None and value is not None:
            first_token = num_decodes if batch.decode_slots is None else 0
            write(key, value, cache, batch.slots, first_token=first_token, query=query, rotation=rotation)
        if num_decodes:
            kv_heads = cache.keys.shape[2]
            dims = tile_dims(query.shape[2], out.shape[2])
            itemsizes = query.element_size(), cache.keys.element_size()
            programs = programs_per_sm(query.shape[1] // kv_heads, dims, *itemsizes, card_of(query.device))
            plan = self._plans(scoring.sliding_window or 0, kv_heads, 1, programs, of_decodes=True)
            decode(query, key, value, cache, batch, out, scoring, plan, rotation=rotation)
        if has_prefills:
            prefill(query, cache, batch, out, scoring, plan_of=self._plans)
        return out


def scalars(scoring: Scoring) -> tuple[float, float]:
    """Return the factor of scores in the kernels and the softcap, both for weights as powers of 2."""
    log2_e = math.log2(math.e)
    if scoring.softcap is None:
        return scoring.scaling * log2_e, 0.0
    # tanh(x) = 1 - 2 / (1 + exp(2 x))
    return 2 * scoring.scaling * log2_e / scoring.softcap, scoring.softcap * log2_e


def _has(scoring: Scoring) -> dict[str, bool]:
    return {"HAS_SOFTCAP": scoring.softcap is not None, "HAS_SINKS": scoring.sinks is not None}


@functools.cache
def programs_per_sm(group: int, dims: Dims, itemsize: int, cache_itemsize: int, card: Card) -> int:
    """Return how many programs of the decode kernel fit into an SM. A test compares this with the compiled kernel."""
    by_registers = 3
    if group > 16 or sum(dims) * itemsize // cache_itemsize > 512:
        by_registers = 2
    elif cache_itemsize == 1 and sum(dims) <= 128:
        by_registers = 4
    tile = decode_tile(group, dims, itemsize, cache_itemsize, card)
    bytes_ = shared_bytes(tile, dims, itemsize, card, cache_itemsize)
    return max(1, min(by_registers, card.sm_bytes // (bytes_ + RESERVED_BYTES)))


def num_items(kv_heads: int, programs: int, device: torch.device) -> int:
    """Return the number of items for the decodes of a step.

    It is as many as all SMs run at once, unless items become too small. More items would only have to be combined.
    """
    return max(1, num_multiprocessors(device) * programs // kv_heads)


class Plan(NamedTuple):
    """The work of a step's prompts or decodes, for each key head, as `plan_kernel` describes it."""

    items: torch.Tensor  # int32 [most, 5]
    num_items: torch.Tensor  # int32 [1]
    num_done: torch.Tensor  # int32 [most, kv_heads], zeros before and after each layer
    num_places: int  # limit of items in tiles with several parts
    alignment: int  # A part has a multiple of this many tokens.


class Plans:
    """The plans of one step. Layers share them."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._made: dict[tuple[int, ...], Plan] = {}

    def __call__(
        self, window: int, kv_heads: int, tile_tokens: int, programs: int = 1, *, of_decodes: bool = False
    ) -> Plan:
        """Return the plan for a sliding window, a number of key heads, a tile's tokens, and programs per SM."""
        key = window, kv_heads, tile_tokens, programs, of_decodes
        if key not in self._made:
            wanted = num_items(kv_heads, programs, self._batch.seq_lens.device)
            self._made[key] = new_plan(self._batch, window, wanted, kv_heads, tile_tokens, of_decodes=of_decodes)
        return self._made[key]


def new_plan(
    batch: Batch,
    window: int,
    num_wanted: int,
    kv_heads: int,
    tile_tokens: int,
    least_tokens: int = LEAST_ITEM_TOKENS,
    alignment: int = ITEM_ALIGNMENT,
    *,
    of_decodes: bool = False,
) -> Plan:
    """Cut a batch's prompts into tiles of tokens, or its decodes.

    If there are fewer than `num_wanted` tiles, their keys are cut into parts.
    """
    first_sequence = batch.num_decodes
    num_sequences = len(batch.query_lens) - batch.num_decodes
    num_tokens = len(batch.input_ids) - (batch.num_decodes if batch.decode_slots is None else 0)
    if of_decodes:
        first_sequence = 0
        num_sequences = num_tokens = batch.num_decodes
    # The host doesn't know the number of tiles. This is an upper bound for this number of tokens.
    most = (num_tokens + num_sequences * (tile_tokens - 1)) // tile_tokens + num_wanted
    device = batch.seq_lens.device
    plan = Plan(
        torch.empty(most, 5, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty(most, kv_heads, dtype=torch.int32, device=device),
        2 * num_wanted,
        alignment,
    )
    plan_kernel[(num_sequences,)](
        *(batch.query_start, batch.seq_lens, *plan[:3]),
        *(first_sequence, num_sequences, num_wanted),
        WINDOW=window,
        TILE_TOKENS=tile_tokens,
        LEAST_TOKENS=least_tokens,
        ITEM_ALIGNMENT=alignment,
        TILE=PLANNED_AT_A_TIME,
        KV_HEADS=kv_heads,
        TILE_KV_HEADS=triton.next_power_of_2(kv_heads),
    )
    return plan


class Dims(NamedTuple):
    """The numbers of a head's key and value in a tile: powers of two."""

    key: int
    value: int


@functools.cache
def tile_dims(key_dim: int, value_dim: int) -> Dims:
    """Return the dimensions of tiles. Triton's matrix product needs at least 16."""
    return Dims(max(16, triton.next_power_of_2(key_dim)), max(16, triton.next_power_of_2(value_dim)))


@functools.cache
def decode_tile(group: int, dims: Dims, itemsize: int, cache_itemsize: int, card: Card) -> Tile:
    """Return the decode tile for `group` query heads per key head."""
    token_bytes = triton.next_power_of_2(sum(dims) * itemsize)
    # These were the fastest of 18 on an H100. More keys at a time with fewer stages beat fewer keys with more.
    if token_bytes <= 512:
        tokens = 128
        num_stages = 3 if sum(dims) * cache_itemsize <= 256 else 2
    else:
        tokens = max(LEAST_TOKENS, DECODE_BYTES // token_bytes)
        num_stages = 3
    if card.sm_bytes < LARGE_SM_BYTES:  # smaller tiles, so that several programs can hide each other's waits
        tokens = min(tokens, 64)
        num_stages = 2
    rows = max(16, triton.next_power_of_2(group))
    num_warps = 8 if itemsize == 4 else 4
    if rows >= 64:  # each thread has several rows, and fewer registers for keys
        tokens = min(tokens, 32)
        num_warps = 8
        num_stages = 2
    return _fitting(Tile(rows, tokens, num_warps, num_stages), rows, dims, itemsize, card)


@functools.cache
def prefill_tile(group: int, dims: Dims, itemsize: int, cache_itemsize: int, longest_query: int, card: Card) -> Tile:
    """Return one of only two tiles for a model's prefills. Any other one would be compiled during a request."""
    least_rows = max(16, triton.next_power_of_2(group))
    # Converting 8-bit keys and values takes registers that Hopper's own tiles don't leave.
    is_hopper = card.is_hopper and cache_itemsize == itemsize
    tile = _preferred_prefill_tile(sum(dims), itemsize, longest_query * group <= 64, is_hopper)
    rows = max(tile.rows, least_rows)
    return _fitting(tile._replace(rows=rows), least_rows, dims, itemsize, card)


def _preferred_prefill_tile(numbers: int, itemsize: int, is_short: bool, is_hopper: bool) -> Tile:
    """Return the tile for keys and values of `numbers` numbers in total, if the rows of one token fit into it."""
    if itemsize == 4:  # float32 does not use tensor cores: it serves comparisons, not speed
        return Tile(32, tokens=16, num_warps=8, num_stages=2)
    if numbers > 512 and is_hopper:
        return Tile(64, tokens=16, num_warps=8, num_stages=2)
    if numbers > 512:
        return Tile(32, tokens=32, num_warps=8, num_stages=2)
    rows = 64 if is_short else 128
    if numbers > 256:
        return Tile(64, tokens=32, num_warps=8, num_stages=2)  # With 128 rows it spills registers.
    if numbers <= 128 and rows == 128 and is_hopper:  # Other cards spill registers.
        return Tile(rows, tokens=128, num_warps=4, num_stages=3)
    return Tile(rows, tokens=64, num_warps=4 if rows == 64 or numbers <= 128 else 8, num_stages=3)


def _fitting(tile: Tile, least_rows: int, dims: Dims, itemsize: int, card: Card) -> Tile:
    """Return the tile or, if it needs too much shared memory, the largest smaller one that fits the card.

    None fits if a single token has too many rows. Triton then raises an error when the start probes the kernels.
    """
    while shared_bytes(tile, dims, itemsize, card) > card.shared_bytes:
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.rows > max(64, least_rows):
            tile = tile._replace(rows=tile.rows // 2)
        elif tile.tokens > LEAST_TOKENS:
            tile = tile._replace(tokens=tile.tokens // 2)
        elif tile.rows > least_rows:
            tile = tile._replace(rows=tile.rows // 2)
        else:
            break
    return tile


def shared_bytes(tile: Tile, dims: Dims, itemsize: int, card: Card, cache_itemsize: int | None = None) -> int:
    """Return the bytes of shared memory of an attention kernel.

    They hold queries, the stages of keys and values, and weights, unless each warp keeps those of its rows in
    registers. A test compares this with the compiled kernel.
    """
    is_whole_group = card.is_hopper and tile.rows >= 64 and itemsize == 2  # four warps multiply together
    stages = tile.num_stages if is_whole_group else tile.num_stages - 1
    queries = tile.rows * dims.key * itemsize
    tokens = stages * tile.tokens * sum(dims) * (cache_itemsize or itemsize)
    has_weights = not is_whole_group and (tile.rows < 128 or tile.tokens < 64)
    return queries + tokens + has_weights * tile.rows * tile.tokens * itemsize


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    first_token: int,
    query: torch.Tensor | None = None,
    rotation: Rotation | None = None,
) -> None:
    """Write the keys and values of the tokens from `first_token` on, of all heads, into their slots of the cache.

    With a rotation, keys are normed and rotated first. These tokens' queries are normed and rotated in place.
    """
    query = present(query, key)
    tensors = query, key, value, slots, *cache
    constants = _write_constants(query.shape[1], key.shape[1], key.shape[2], value.shape[2], rotation is not None)
    num_tokens = key.shape[0] - first_token
    write_kernel[(-(-num_tokens // constants["TILE_TOKENS"]),)](
        *tensors,
        *cache.scales,
        *_rotation(rotation, key),
        *(first_token, num_tokens),
        *(query.stride(0), key.stride(0), value.stride(0)),
        **constants,
        **_rotation_constants(rotation),
    )


def _rotation(rotation: Rotation | None, key: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
    """Return the tensors of a rotation for kernels. A missing tensor is replaced by one that isn't read."""
    if rotation is None:
        return key, key, key, key, key, 0.0
    tensors = rotation.cosines, rotation.sines, rotation.query_norm, rotation.key_norm
    return rotation.positions, *(present(tensor, key) for tensor in tensors), rotation.epsilon


def _rotation_constants(rotation: Rotation | None) -> dict[str, int]:
    if rotation is None:
        return {"ROTARY_DIM": 0, "APART": 0, "HAS_NORMS": False}
    has_norms = rotation.query_norm is not None
    return {"ROTARY_DIM": rotation.rotary_dim, "APART": rotation.apart, "HAS_NORMS": has_norms}


def decode(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: LayerCache,
    batch: Batch,
    out: torch.Tensor,
    scoring: Scoring,
    plan: Plan,
    tile: Tile | None = None,
    rotation: Rotation | None = None,
) -> None:
    """Compute the first `batch.num_decodes` rows of `out` [T, heads, value_dim], and write their keys and values."""
    heads = query.shape[1]
    kv_heads = cache.keys.shape[2]
    has_keys = key is not None
    key = present(key, query)
    value = present(value, query)
    constants = _constants(heads, *cache.keys.shape[1:], cache.values.shape[3])
    dims = Dims(constants["TILE_KEY_DIM"], constants["TILE_VALUE_DIM"])
    itemsizes = query.element_size(), cache.keys.element_size()
    tile = tile or decode_tile(constants["GROUP"], dims, *itemsizes, card_of(query.device))
    (factor, softcap) = scalars(scoring)
    key_scale, value_scale = cache.scales
    partial = torch.empty(plan.num_places, heads, out.shape[2], dtype=torch.float32, device=out.device)
    log_weights = torch.empty(plan.num_places, heads, dtype=torch.float32, device=out.device)
    tensors = query, key, value, out, partial, log_weights, *cache, *plan[:3]
    slots = batch.slots if batch.decode_slots is None else batch.decode_slots
    decode_kernel[(kv_heads, len(plan.items))](
        *tensors,
        *(slots, batch.seq_lens, batch.block_tables, batch.table_rows),
        *_rotation(rotation, key),
        *(factor * key_scale, softcap, key_scale, value_scale),
        present(scoring.sinks, query),
        scoring.sliding_window or NO_WINDOW,
        *(query.stride(0), key.stride(0), value.stride(0), batch.block_tables.stride(0)),
        **_has(scoring),
        HAS_KEYS=has_keys,
        ITEM_ALIGNMENT=plan.alignment,
        TILE_ROWS=tile.rows,
        TILE_N=tile.tokens,
        TILE_ITEMS=COMBINED_AT_A_TIME,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
        **_rotation_constants(rotation),
    )


def prefill(
    query: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    out: torch.Tensor,
    scoring: Scoring,
    tile: Tile | None = None,
    *,
    plan_of: Callable[[int, int, int], Plan],
) -> None:
    """Compute the rows of prefills in `out` [T, heads, value_dim]. Their keys and values are already in the cache.

    Without a tile, the one for the batch's longest query is used. `plan_of` returns the plan for a sliding window, a
    number of key heads, and a number of tokens of a tile.
    """
    kv_heads = cache.keys.shape[2]
    constants = _constants(query.shape[1], *cache.keys.shape[1:], cache.values.shape[3])
    if tile is None:
        dims = Dims(constants["TILE_KEY_DIM"], constants["TILE_VALUE_DIM"])
        longest = max(batch.query_lens[batch.num_decodes :])
        itemsizes = query.element_size(), cache.keys.element_size()
        tile = prefill_tile(constants["GROUP"], dims, *itemsizes, longest, card_of(query.device))
    plan = plan_of(scoring.sliding_window or 0, kv_heads, tile.rows // constants["GROUP"])
    places = plan.num_places, kv_heads, tile.rows
    partial = torch.empty(*places, out.shape[2], dtype=torch.float32, device=out.device)
    log_weights = torch.empty(places, dtype=torch.float32, device=out.device)
    (factor, softcap) = scalars(scoring)
    (key_scale, value_scale) = cache.scales
    prefill_kernel[(kv_heads * len(plan.items),)](
        *(query, out, partial, log_weights, *cache, *plan[:3]),
        *(batch.query_start, batch.seq_lens, batch.block_tables, batch.table_rows),
        present(batch.last_visible, batch.slots),
        *(factor * key_scale, softcap, value_scale),
        present(scoring.sinks, query),
        batch.num_decodes,
        *(query.stride(0), batch.block_tables.stride(0)),
        LOOKS_AHEAD=scoring.looks_ahead and batch.last_visible is not None,
        WINDOW=scoring.sliding_window or 0,
        **_has(scoring),
        ITEM_ALIGNMENT=plan.alignment,
        TILE_ROWS=tile.rows,
        TILE_N=tile.tokens,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )


# The result is cached, like tiles, because Triton's arithmetic is slow on the host, and every layer of every step needs
# it.
@functools.cache
def _constants(heads: int, block_size: int, kv_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the constants that both attention kernels share."""
    dims = tile_dims(key_dim, value_dim)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TILE_KEY_DIM": dims.key,
        "TILE_VALUE_DIM": dims.value,
        "BLOCK_SIZE": block_size,
    }


@functools.cache
def _write_constants(heads: int, kv_heads: int, key_dim: int, value_dim: int, is_turned: bool) -> dict[str, int]:
    """Return the constants of the kernel that writes into the cache."""
    tile_heads = triton.next_power_of_2(heads)
    tile_kv_heads = triton.next_power_of_2(kv_heads)
    tile_key_dim = triton.next_power_of_2(key_dim)
    tile_value_dim = triton.next_power_of_2(value_dim)
    numbers = (tile_heads if is_turned else tile_kv_heads) * max(tile_key_dim, tile_value_dim)
    tokens = max(1, WRITE_NUMBERS // numbers)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TILE_TOKENS": tokens,
        "TILE_HEADS": tile_heads,
        "TILE_KV_HEADS": tile_kv_heads,
        "TILE_KEY_DIM": tile_key_dim,
        "TILE_VALUE_DIM": tile_value_dim,
        # Each thread has 16 numbers, 2 bytes each in most models, and more if there are many heads.
        "num_warps": min(8 if numbers <= 2 * WRITE_NUMBERS else 16, max(1, tokens * numbers // 512)),
    }


@functools.cache
def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return HOPPER
    if torch.version.hip is not None:
        return AMD
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", HOPPER.shared_bytes)
    sm_bytes = getattr(properties, "shared_memory_per_multiprocessor", HOPPER.sm_bytes)
    return Card(shared_bytes, sm_bytes, is_hopper=properties.major == 9)
