"""Checks the Triton kernels of attention, sampling and masks against the reference."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.attention import triton as backend
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.sampling import plain_sampling, triton_sampling
from oaiserve.engine.model.sampling.draw_rows import DrawRow, draw_row
from oaiserve.engine.model.sampling.logit_edits import apply_masks_in_torch
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class AttentionShape(NamedTuple):
    """The heads of one layer's attention, and their type."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "gpt2-124m": AttentionShape(12, 12, 64, 64),
    "llama-3.2-1b": AttentionShape(32, 8, 64, 64),
    "llama-3.1-8b": AttentionShape(32, 8, 128, 128),
    "gemma-2-9b": AttentionShape(16, 8, 256, 256),
}


@torch.inference_mode()
def check(device: torch.device, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Compare the kernels with the reference."""
    torch.manual_seed(0)
    yield {"triton": triton.__version__, "interpreted": device.type == "cpu"}
    rows = []
    for case in attention_cases(quick):
        rows.append(check_attention(case, device))
        yield {"attention": rows}
    yield {"attention": rows + [check_captured(shape, device) for shape in SHAPES.values()]}
    yield {"sampling": [check_sampling(spread, device, quick=quick) for spread in (0.1, 3.0, 20.0)]}
    yield {"masks": [check_masks(vocab, device) for vocab in ([300] if quick else [32_000, 49_152, 151_669, 262_144])]}


class Case(NamedTuple):
    shape: AttentionShape
    lengths: list[tuple[int, int]]  # (tokens in the cache, new tokens), those with one new token first
    block_size: int = BLOCK_SIZE
    window: int | None = None
    softcap: float | None = None


def attention_cases(quick: bool) -> list[Case]:
    mixed = [(0, 1), (500, 1), (3000, 1), (0, 1), (0, 17), (300, 200), (100, 700)]
    many = [(37 * i % 900, 1) for i in range(70)]
    long = [(20_000, 1), (9, 1)]
    if quick:
        mixed, many, long = [(5, 1), (70, 1), (30, 20)], [(3 * i, 1) for i in range(4)], [(300, 1)]
    dims = [16, 64, 80, 96, 128, 256]
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    cases = [Case(AttentionShape(8, 2, dim, dim, dtype), mixed) for dim in dims for dtype in dtypes]
    base = AttentionShape(8, 2, 128, 128)
    cases += [Case(base._replace(heads=heads, kv_heads=kv), mixed) for heads, kv in ((12, 12), (9, 3), (71, 1))]
    cases += [Case(base, mixed, block_size=size) for size in (8, 32, 256)]
    cases += [Case(base, mixed, window=window, softcap=cap) for window in (None, 100) for cap in (None, 5.0)]
    cases += [Case(base._replace(value_dim=64), mixed), Case(base._replace(key_dim=192), mixed)]
    return cases + [Case(shape, lengths) for shape in SHAPES.values() for lengths in (many, long)]


def make_batch(lengths: list[tuple[int, int]], block_size: int, device: torch.device) -> Batch:
    """Make a batch of sequences whose blocks are in random order."""
    free = torch.randperm(sum(-(-(old + new) // block_size) for old, new in lengths)).tolist()
    step = Step()
    for old, new in lengths:
        sequence = make_sequence(num_tokens=old + new)
        sequence.blocks = [free.pop() for _ in range(-(-(old + new) // block_size))]
        step.chunks.append(Chunk(sequence, old, new))
    return build_batch(step, block_size, device)


def make_tensors(
    shape: AttentionShape, num_tokens: int, num_blocks: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerCache]:
    """Make the query, key and value of a step, and a KV cache full of random numbers."""

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=shape.dtype, device=device)

    heads, kv_heads, key_dim, value_dim, _ = shape
    cache = LayerCache(
        randn(num_blocks, block_size, kv_heads, key_dim), randn(num_blocks, block_size, kv_heads, value_dim)
    )
    query, key = randn(heads, num_tokens, key_dim).transpose(0, 1), randn(kv_heads, num_tokens, key_dim).transpose(0, 1)
    return query, key, randn(num_tokens, kv_heads, value_dim), cache


def attend_exactly(batch: Batch, *arguments: Any) -> torch.Tensor:
    """Run the reference without torch's attention kernels for GPUs, which round in their own way."""
    with sdpa_kernel(SDPBackend.MATH):
        return ReferenceAttention(batch)(*arguments)


def check_attention(case: Case, device: torch.device) -> dict[str, Any]:
    batch = make_batch(case.lengths, case.block_size, device)
    num_blocks = int(batch.block_tables.max()) + 1
    query, key, value, cache = make_tensors(case.shape, sum(batch.query_lens), num_blocks, case.block_size, device)
    scoring = Scoring(case.shape.key_dim**-0.5, case.window, case.softcap)
    copies = LayerCache(cache.keys.float(), cache.values.float())
    want = attend_exactly(batch, query.float(), key.float(), value.float(), copies, scoring)
    got = backend.TritonAttention(batch)(query, key, value, cache, scoring)
    difference = float((got.float() - want).abs().max())
    is_written = all(torch.equal(a.float(), b) for a, b in zip(cache, copies, strict=True))
    tolerance = TOLERANCE[case.shape.dtype]
    equal = is_written and bool(torch.isclose(got.float(), want, rtol=tolerance, atol=tolerance).all())
    shape = case.shape._replace(dtype=str(case.shape.dtype).removeprefix("torch."))  # type: ignore[arg-type]
    about = {**shape._asdict(), "block_size": case.block_size, "window": case.window, "softcap": case.softcap}
    if not equal:
        print(f"DIFFERENT by {difference}: {about}", file=sys.stderr, flush=True)
    return {**about, "sequences": len(case.lengths), "difference": difference, "equal": equal}


def check_captured(shape: AttentionShape, device: torch.device) -> dict[str, Any]:
    """Capture a decode step for long sequences, and replay it for others, one of which is padding."""
    lengths = [(1000, 1), (0, 1), (77, 1)]
    batch = make_batch(lengths, BLOCK_SIZE, device)
    num_blocks = int(batch.block_tables.max()) + 1
    query, key, value, cache = make_tensors(shape, len(lengths), num_blocks, BLOCK_SIZE, device)
    scoring = Scoring(shape.key_dim**-0.5)
    copies = LayerCache(cache.keys.float(), cache.values.float())
    want = attend_exactly(batch, query.float(), key.float(), value.float(), copies, scoring)
    want[1] = 0.0
    seq_lens, slots = batch.seq_lens.clone(), batch.slots.clone()
    seq_lens[1], slots[1] = 0, -1
    batch.seq_lens.zero_()
    batch.slots.fill_(-1)
    out = torch.full_like(want, math.nan, dtype=shape.dtype)

    def decode() -> None:
        backend.TritonAttention(batch).decode(query, key, value, cache, out, scoring)

    graph = None
    if device.type == "cuda":
        decode()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
    batch.seq_lens.copy_(seq_lens)
    batch.slots.copy_(slots)
    if graph is not None:
        graph.replay()
    else:
        decode()
    difference = float((out.float() - want).abs().max())
    return {"captured": str(shape), "difference": difference, "equal": difference < 3e-2}


def check_sampling(spread: float, device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Compare draws for rows of all kinds. A few rows may differ, where rounding decides which ids top_p keeps."""
    num_rows, vocab = (8, 300) if quick else (256, 128_256)
    logits = (torch.randn(num_rows, vocab, device=device) * spread).bfloat16()
    logits[0, 7], logits[1] = math.nan, -math.inf
    rows = [
        make_row(
            row,
            temperature=(0.0, 0.6, 1.0)[row % 3],
            top_k=(0, 0, 40, 1)[row % 4],
            top_p=(1.0, 0.95, 1.0, 0.5, 0.9)[row % 5],
            min_p=(0.0, 0.05)[row % 7 == 0],
        )
        for row in range(num_rows)
    ]
    token_ids, are_finite = triton_sampling.sample_ids(logits, rows)
    want_ids, want_finite = plain_sampling.sample_ids(logits, rows)
    num_different = int(((token_ids != want_ids) & want_finite).sum())
    equal = bool((are_finite == want_finite).all()) and num_different <= num_rows // 64
    return {"spread": spread, "rows": num_rows, "vocab": vocab, "different": num_different, "equal": equal}


def check_masks(vocab: int, device: torch.device) -> dict[str, Any]:
    """Compare the masks of grammars, for every other row, with those of plain torch."""
    logits = torch.randn(16, vocab, device=device)
    rows, words = make_masks(len(logits), vocab)
    got, want = logits.clone(), logits.clone()
    triton_sampling.apply_masks(got, rows, words)
    apply_masks_in_torch(want, rows, words)
    return {"rows": len(rows), "vocab": vocab, "equal": torch.equal(got, want)}


def make_masks(num_rows: int, vocab: int) -> tuple[list[int], np.ndarray]:
    """Make a random mask for every other row."""
    rows = list(range(0, num_rows, 2))
    return rows, np.random.default_rng(0).integers(0, 2**32, (len(rows), -(-vocab // 32)), dtype=np.uint32)


def make_sequence(draw_key: int = 0, num_tokens: int = 1, **params: Any) -> Sequence:
    return Sequence("r", 0, [1] * num_tokens, SamplingParams(**params), max_len=num_tokens + 1, draw_key=draw_key)


def make_row(draw_key: int, **params: Any) -> DrawRow:
    """Return the row that draws the second token of a sequence."""
    return draw_row(make_sequence(draw_key, **params), 1)
