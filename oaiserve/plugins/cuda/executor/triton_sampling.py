"""Sampling with Triton kernels: a few launches, without a sort, replace the draws on the host.

Sampled ids are those of `noise` up to float32 rounding. If two scores, or a probability and the limit of top_p or
min_p, differ by less than that, either may win. Equal logits are in the order of their ids. `draw` reads nothing back
and waits for nothing, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from oaiserve.engine.model.sampling.sampled_ids import DeviceEdits, SampledIds
from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.sequences.draw_rows import parameters_of, seeds
from oaiserve.plugins.cuda.executor.triton_sampling_kernels import (
    NUM_FLOORS,
    best_kernel,
    best_of_chunk_kernel,
    candidates_kernel,
    cut_kernel,
    scores_kernel,
    weights_kernel,
)

CHUNK = 4096  # ids that one program processes
TILE = 2048  # candidates that a program processes at once


def sample_ids(logits: torch.Tensor, rows: list[DrawRow], edits: DeviceEdits | None = None) -> SampledIds:
    """Draw a token from each row of `logits` [R, vocab], which are not changed."""
    parameters = on_device(parameters_of(rows), logits.device, torch.float32)
    return draw(logits, parameters, on_device(seeds(rows), logits.device), edits=edits)


def draw(
    logits: torch.Tensor,
    parameters: torch.Tensor,
    seeds: torch.Tensor,
    out: SampledIds | None = None,
    edits: DeviceEdits | None = None,
) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab].

    `parameters` float32 [columns, R] and `seeds` int64 [R] belong to the rows, see `draw_rows`. `out` has the tensors
    for the results, both int64 [R]. `edits` are applied where logits are read, and the ids of rows with penalties are
    counted.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    grid = (num_rows, num_chunks)
    of_rows = parameters, parameters.stride(0)
    penalties = (logits,) * 3 if edits is None else edits.penalties
    masks = None if edits is None else edits.masks
    of_masks = (logits, logits, 1) if masks is None else (*masks, masks.words.shape[1])
    of_logits = (logits.stride(0), vocab, *penalties, *of_masks)
    has = {"HAS_PENALTIES": edits is not None, "HAS_MASKS": masks is not None}
    tile_chunks = triton.next_power_of_2(num_chunks)
    chunks = {"CHUNK": CHUNK, "TILE_CHUNKS": tile_chunks}
    best = empty(*grid, dtype=torch.int64)
    scores = empty(*grid, dtype=torch.int64)
    weights = empty(num_rows, vocab)
    masses = empty(*grid)
    floors = empty(*grid, NUM_FLOORS.value, dtype=torch.int32), empty(*grid, NUM_FLOORS.value)
    candidates = (
        *(empty(num_rows, vocab), empty(num_rows, vocab, dtype=torch.int32)),
        empty(num_rows, dtype=torch.int32),
    )
    last = empty(num_rows), empty(num_rows, dtype=torch.int32)
    token_ids, are_finite = out or (empty(num_rows, dtype=torch.int64), empty(num_rows, dtype=torch.bool))

    best_of_chunk_kernel[grid](logits, best, *of_logits, CHUNK=CHUNK, **has)
    weights_kernel[grid](logits, best, *of_rows, masses, weights, *floors, *of_logits, **chunks, **has, num_warps=8)
    candidates_kernel[grid](weights, masses, *floors, *of_rows, *candidates, vocab, **chunks, num_warps=8)
    sizes = {"TILE_CHUNKS": tile_chunks, "TILE": TILE, "num_warps": 8}
    cut_kernel[(num_rows,)](masses, *of_rows, *candidates, *last, vocab, num_chunks, **sizes)
    scores_kernel[grid](logits, best, *of_rows, seeds, weights, *last, scores, *of_logits, **chunks, **has)
    counts, _, count_rows = penalties
    best_kernel[(num_rows,)](
        *(best, scores, token_ids, are_finite, num_chunks, vocab, counts, count_rows),
        TILE_CHUNKS=tile_chunks,
        HAS_PENALTIES=edits is not None,
        num_warps=1,
    )
    return token_ids, are_finite
