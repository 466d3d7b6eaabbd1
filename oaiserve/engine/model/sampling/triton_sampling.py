"""Sampling with Triton kernels: a few launches, without a sort, replace the draws on the host.

Sampled ids are those of `draws` up to float32 rounding: of two scores, or sides of a border of top_p or min_p within
it, either may count. Equal logits are in the order of their ids. `take_best` and `draw` read nothing back and wait for
nothing, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from oaiserve.engine.model.sampling.draw_rows import DrawRow, SampledIds, numbers, seeds
from oaiserve.engine.model.sampling.triton_sampling_kernels import (
    NUM_FLOORS,
    best_kernel,
    best_of_chunk_kernel,
    candidates_kernel,
    cut_kernel,
    mask_kernel,
    scores_kernel,
    weights_kernel,
)
from oaiserve.engine.model.transfer import on_device

CHUNK = 4096  # ids that one program processes
TILE = 2048  # candidates that a program processes at a time


def sample_ids(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Draw a token from each row of `logits` [R, vocab], which are not changed."""
    if all(row.is_greedy for row in rows):
        return take_best(logits)
    has_cuts = any(row.cuts(logits.shape[-1]) for row in rows)
    parameters = on_device(numbers(rows), logits.device, torch.float32)
    return draw(logits, parameters, on_device(seeds(rows), logits.device), has_cuts=has_cuts)


def apply_masks(logits: torch.Tensor, rows: list[int], words: np.ndarray) -> None:
    """Apply masks as `logit_edits.ApplyMasks` says; all go to the device in one copy."""
    assert logits.stride(1) == 1
    num_masks, num_words = words.shape
    masks = np.empty((num_masks, 1 + num_words), dtype=np.int32)
    masks[:, 1:] = words.view(np.int32)
    masks[:, 0] = rows
    mask_kernel[(num_masks, triton.cdiv(logits.shape[1], CHUNK))](
        logits, on_device(masks, logits.device, torch.int32), logits.stride(0), logits.shape[1], num_words, CHUNK=CHUNK
    )


def take_best(logits: torch.Tensor, out: SampledIds | None = None) -> SampledIds:
    """Return the id of each row's highest logit, the lowest of equal ones. `out` has the results, int64 [R] each."""
    logits = _with_rows_in_one_piece(logits)
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    best_of_chunk_kernel[(num_rows, num_chunks)](logits, best, logits.stride(0), vocab, CHUNK=CHUNK)
    return _take(best, best, out)


def draw(
    logits: torch.Tensor,
    parameters: torch.Tensor,
    seeds: torch.Tensor,
    *,
    has_cuts: bool,
    out: SampledIds | None = None,
) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]. `parameters` float32 [4, R] and `seeds` int64 [R] are those of
    the rows, see `draw_rows`.

    Without `has_cuts`, their top_p is ignored, and so is a top_k except 1. `out` has the tensors of results,
    both int64 [R].
    """
    logits = _with_rows_in_one_piece(logits)
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)
    temperatures, min_ps, *cuts = parameters

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    grid = (num_rows, num_chunks)
    of_logits = (logits.stride(0), vocab)
    chunks = {"CHUNK": CHUNK, "TILE_CHUNKS": triton.next_power_of_2(num_chunks)}
    best = empty(*grid, dtype=torch.int64)
    scores = empty(*grid, dtype=torch.int64)
    # The kernels use these only if top_k or top_p is applied.
    rows_of_cuts = num_rows if has_cuts else 0
    weights = empty(rows_of_cuts, vocab)
    last = empty(rows_of_cuts), empty(rows_of_cuts, dtype=torch.int32)

    best_of_chunk_kernel[grid](logits, best, *of_logits, CHUNK=CHUNK)
    if has_cuts:
        masses = empty(*grid)
        floors = empty(*grid, NUM_FLOORS.value, dtype=torch.int32), empty(*grid, NUM_FLOORS.value)
        candidates = (
            *(empty(num_rows, vocab), empty(num_rows, vocab, dtype=torch.int32)),
            empty(num_rows, dtype=torch.int32),
        )
        weights_kernel[grid](
            logits, best, temperatures, min_ps, masses, weights, *floors, *of_logits, **chunks, num_warps=8
        )
        candidates_kernel[grid](weights, masses, *floors, *cuts, *candidates, vocab, **chunks, num_warps=8)
        sizes = {"TILE_CHUNKS": chunks["TILE_CHUNKS"], "TILE": TILE, "num_warps": 8}
        cut_kernel[(num_rows,)](masses, *cuts, *candidates, *last, vocab, num_chunks, **sizes)
    of_rows = temperatures, min_ps, cuts[0], seeds
    scores_kernel[grid](logits, best, *of_rows, weights, *last, scores, *of_logits, HAS_CUTS=has_cuts, **chunks)
    return _take(best, scores, out)


def _with_rows_in_one_piece(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _take(best: torch.Tensor, scores: torch.Tensor, out: SampledIds | None) -> SampledIds:
    """Return the ids with the best of the scores [R, num_chunks], and whether the best logits are finite."""
    num_rows, num_chunks = best.shape
    token_ids, are_finite = out or (
        torch.empty(num_rows, dtype=torch.int64, device=best.device),
        torch.empty(num_rows, dtype=torch.bool, device=best.device),
    )
    best_kernel[(num_rows,)](
        best, scores, token_ids, are_finite, num_chunks, TILE_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return token_ids, are_finite
