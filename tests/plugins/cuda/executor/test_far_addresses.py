"""Kernels reach numbers whose offset from the start of a tensor needs more than 32 bits, in Triton's interpreter.

The tensors are sparse: only the pages that are written take memory. A wrapped offset is in front of a tensor's first
number, where there are zeros.
"""

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.description import Norm
from oaiserve.engine.model.attention import FP8, LayerCache, Scoring
from oaiserve.engine.sequences.draw_columns import GREEDY, DrawRow
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, PackedMatrix
from tests.engine.model.attention_inputs import make_inputs
from tests.plugins.cuda.executor.packed_matrices import numbers

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from triton.runtime import interpreter

from oaiserve.plugins.cuda.executor import triton_latent, triton_layers, triton_products, triton_sampling, triton_states
from oaiserve.plugins.cuda.executor.triton_attention import TritonAttention

pytestmark = pytest.mark.kernels

APART = 1 << 30  # Three times this is more than 32 bits with a sign can have.
LENGTHS = ((7, 1), (20, 1), (0, 5), (30, 12))  # (tokens in the cache, tokens of this step) of each sequence


@pytest.fixture(autouse=True)
def tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the interpreter's copies to a device, each of which would write all pages of a tensor."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)


def sparse(num: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written, with others in front of them."""
    before = 2 * APART * dtype.itemsize
    memory = mmap.mmap(-1, before + num * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(memory, dtype=torch.uint8)[before:].view(dtype)


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    """Return the same rows, each `APART` numbers after the one before it."""
    rows = rows.contiguous()
    far = sparse(len(rows) * APART, rows.dtype).as_strided(rows.shape, (APART, *rows.stride()[1:]))
    return far.copy_(rows)


def at_the_end(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return a cache whose blocks from `first` on are these."""
    whole = sparse((first + len(blocks)) * blocks[0].numel(), blocks.dtype).view(-1, *blocks.shape[1:])
    whole[first:] = blocks
    return whole[: first + len(blocks)]


@pytest.mark.parametrize("dim", [64, 112])
def test_attention_reads_and_writes_the_last_blocks_of_a_large_cache(dim: int) -> None:
    query, key, value, cache, batch = make_inputs(LENGTHS, key_dim=dim, dtype=torch.bfloat16)
    near = LayerCache(cache.keys.clone(), cache.values.clone())
    want = TritonAttention(batch)(query.clone(), key, value, near, Scoring(0.2))
    first = 3 * APART // cache.keys[0].numel() + 1
    far = LayerCache(*(at_the_end(blocks, first) for blocks in cache))
    batch.block_tables += first
    batch.slots += first * cache.keys.shape[1]
    assert torch.equal(TritonAttention(batch)(query.clone(), key, value, far, Scoring(0.2)), want)
    for blocks, wanted in zip(far, near, strict=True):
        torch.testing.assert_close(blocks[first:], wanted, rtol=0, atol=0, equal_nan=True)


def test_latent_vectors_are_read_from_and_written_to_the_last_blocks_of_a_large_cache() -> None:
    rank = 32
    width = 16
    inputs = make_inputs(LENGTHS, heads=3, kv_heads=1, key_dim=rank + width, value_dim=rank, dtype=torch.bfloat16)
    query, key, _, (cache, _), batch = inputs

    def attended(cache: torch.Tensor) -> torch.Tensor:
        attention = triton_latent.TritonLatentAttention(batch)
        angles: Any = None  # without a rotation
        of_heads = query[..., rank - 7 :].contiguous()
        attention.write(of_heads, key[:, 0, :rank], key[:, 0, rank:], cache, None, angles)
        return attention.attend(query.contiguous(), cache, rank, Scoring(0.2))

    near = cache.clone()
    want = attended(near)
    first = 3 * APART // cache[0].numel() + 1
    far = at_the_end(cache, first)
    batch.block_tables += first
    batch.slots += first * cache.shape[1]
    assert torch.equal(attended(far), want)
    torch.testing.assert_close(far[first:], near, rtol=0, atol=0, equal_nan=True)


def matrices(codes: torch.Tensor) -> ExpertMatrices:
    return ExpertMatrices("float8", codes, torch.ones(len(codes), 1, codes.shape[1]), None)


def of_experts(codes: torch.Tensor) -> torch.Tensor:
    plan = triton_products.planned(torch.arange(len(codes))[:, None], len(codes))
    return triton_products.product(numbers(len(codes), 128), matrices(codes), plan, pairs_of_row=1, factors=None)


def matrix(codes: torch.Tensor) -> PackedMatrix:
    return PackedMatrix("float8", codes, torch.ones(1, len(codes)), None)


def walked(state: torch.Tensor) -> torch.Tensor:
    """Return outputs and states of layers with a state."""
    parts = [numbers(4, 3, 2, 16, seed=seed) for seed in range(3)]
    out = triton_states.recurrence(state, numbers(4, 3, 2).sigmoid(), *parts, None)
    return torch.cat([out.flatten(), state.flatten()])


def added(hidden: torch.Tensor) -> torch.Tensor:
    norm = Norm(torch.ones(48), None, 1e-6, subtracts_mean=False)
    hidden, normed = triton_layers.add_and_norm(hidden, (hidden.clone(),), None, norm)
    return torch.cat([hidden, normed])


FP8_ROWS = numbers(4, 128).to(FP8)
DRAWS = [GREEDY, DrawRow(seed=5), DrawRow(seed=7, top_k=9.0, top_p=0.5), DrawRow(seed=11)]
OPERATIONS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
    "matrices of experts": (numbers(4, 16, 128).to(FP8), of_experts),
    "rows of a matrix": (FP8_ROWS, lambda codes: triton_products.multiply(numbers(3, 128), matrix(codes), None)),
    "rows that are unpacked": (FP8_ROWS, lambda codes: triton_products.unpacked(matrix(codes), torch.float32)),
    "rows of x": (numbers(4, 128), lambda x: triton_products.multiply(x, matrix(FP8_ROWS), None)),
    "rows that are rounded": (numbers(4, 128), lambda x: triton_products.rounded_rows(x).codes.float()),
    "states": (numbers(4, 2, 16, 16), walked),
    "hidden states": (numbers(4, 48), added),
    "products": (numbers(4, 64), lambda products: triton_layers.activate(products, "silu", is_gated=True)),
    "logits": (numbers(4, 5000), lambda logits: triton_sampling.sample_ids(logits, DRAWS)[0]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_reach_rows_that_are_far_apart(name: str) -> None:
    rows, operation = OPERATIONS[name]
    far = far_apart(rows)
    assert torch.equal(operation(far), operation(rows.clone()))
