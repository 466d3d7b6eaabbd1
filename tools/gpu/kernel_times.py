"""Times kernels alone: few tokens after a long context, latent vectors, and draws with penalties, a section each.

Each is shown next to what it replaces: keys that one program of a tile reads, the bytes of the cache at the bandwidth
that a copy reaches, and draws without penalties.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.sampling.sampled_ids import DeviceEdits, Penalties
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor import triton_attention as attention
from oaiserve.plugins.cuda.executor import triton_sampling
from oaiserve.plugins.cuda.executor.triton_latent import TritonLatentAttention
from tests.engine.model.steps import sequence_of
from tools.gpu.parts import Found
from tools.gpu.sections import Target
from tools.gpu.timing import graph_of, median_seconds
from tools.gpu.workload import BLOCK_SIZE

CONTEXT = 30_000
NEW_TOKENS = (1, 8, 64, 256, 2048)
LATENT_HEADS = {"DeepSeek V2 Lite": 16, "GLM-4.7-Flash": 20, "Kimi K2": 64, "DeepSeek V3": 128}
RANK = 512
SHARED = 64
ROWS = (16, 64)
LATENT_CONTEXT = 8192
VOCABULARY = 151_936
DRAW_ROWS = (64, 256)


def few_tokens(target: Target) -> Iterator[Found]:
    """Time a layer of an 8B, with 32 heads of 128 and 8 key heads."""
    device = target.device
    context = 100 if target.quick else CONTEXT
    rows = []
    for count in NEW_TOKENS[:2] if target.quick else NEW_TOKENS:
        batch = _batch([(context, count)], device)
        query, key = (torch.randn(count, heads, 128, dtype=torch.bfloat16, device=device) for heads in (32, 8))
        cache = LayerCache(*torch.randn(2, *_blocks(context + count), 8, 128, dtype=torch.bfloat16, device=device))
        scoring = Scoring(128**-0.5)

        def attend(backend: Any = attention.TritonAttention, inputs: Any = (query, key, key, cache)) -> torch.Tensor:
            out: torch.Tensor = backend(batch)(*inputs, scoring)  # noqa: B023  the call is made in this turn
            return out

        with patch.object(attention, "num_items", lambda *_: 1):
            whole = attend()
            with target.turn():
                whole_seconds = median_seconds(graph_of(attend, device), device)
        cut = attend()
        with target.turn():
            cut_seconds = median_seconds(graph_of(attend, device), device)
        row = {"tokens": count, "context": context, "cut_us": 1e6 * cut_seconds, "whole_us": 1e6 * whole_seconds}
        rows.append(row | ({} if target.is_dry else {"difference": float((whole - cut).abs().max())}))
    yield {"attention": rows}


def latent(target: Target) -> Iterator[Found]:
    """Time decodes of a layer with latent vectors."""
    device = target.device
    context = 100 if target.quick else LATENT_CONTEXT
    rows = []
    for model, heads in LATENT_HEADS.items():
        for count in ROWS[:1] if target.quick else ROWS:
            batch = _batch([(context, 1)] * count, device)
            query = torch.randn(count, heads, RANK + SHARED, dtype=torch.bfloat16, device=device)
            shape = (*_blocks(count * (context + BLOCK_SIZE)), 1, RANK + SHARED)
            keys = torch.randn(shape, dtype=torch.bfloat16, device=device)
            attend = partial(TritonLatentAttention(batch).attend, query, keys, RANK, Scoring(0.07))
            with target.turn():
                seconds = median_seconds(graph_of(attend, device), device)
            num_bytes = count * (context + 1) * (RANK + SHARED) * keys.element_size()
            rows.append({"model": model, "rows": count, "us": 1e6 * seconds, "gb_per_s": num_bytes / seconds / 1e9})
    yield {"attention": rows}


def penalties(target: Target) -> Iterator[Found]:
    """Time draws by temperature, top_k and top_p, with and without counts, in graphs."""
    device = target.device
    vocabulary = 1000 if target.quick else VOCABULARY
    rows = []
    for count in DRAW_ROWS[:1] if target.quick else DRAW_ROWS:
        logits = torch.randn(count, vocabulary, dtype=torch.bfloat16, device=device)
        settings = {"temperature": 0.7, "min_p": 0.0, "top_k": 20.0, "top_p": 0.8}
        columns = torch.tensor([settings[name] for name in DRAW_COLUMNS], device=device)
        parameters = columns[:, None].repeat(1, count)
        seeds = torch.arange(count, device=device)
        counts = torch.zeros(count, vocabulary, dtype=torch.int16, device=device)
        factors = torch.tensor([[1.05, 0.0, 1.5]], device=device).repeat(count, 1)
        row: dict[str, Any] = {"rows": count}
        for name, of_rows in {"us": torch.full_like(seeds, -1), "us_with_penalties": seeds}.items():
            edits = DeviceEdits(Penalties(counts, factors, of_rows))
            draw = partial(triton_sampling.draw, logits, parameters, seeds, edits=edits)
            with target.turn():
                row[name] = 1e6 * median_seconds(graph_of(draw, device), device)
        rows.append(row)
    yield {"draws": rows}


def _batch(sequences: list[tuple[int, int]], device: torch.device) -> Batch:
    """Return a batch of sequences with these tokens in the cache, and these new ones, each in blocks of its own."""
    step = Step()
    num_blocks = 0
    for context, count in sequences:
        end = num_blocks + _blocks(context + count)[0]
        step.chunks.append(Chunk(sequence_of([0] * (context + count), range(num_blocks, end)), context, count))
        num_blocks = end
    return build_batch(step, BLOCK_SIZE, device)


def _blocks(num_tokens: int) -> tuple[int, int]:
    return -(-num_tokens // BLOCK_SIZE), BLOCK_SIZE
