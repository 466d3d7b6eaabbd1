"""Sampling with Triton kernels: a few launches, without a sort, replace the plain torch of `sampler`.

`sample_ids` and `apply_masks` are passed to `Sampling`. Sampled ids are those of plain torch up to float32 rounding.
Sums of probabilities are added up in another order, so a draw that falls within a few millionths of a border between
two tokens may go the other way, and a token whose probability is that close to the floor of min_p may be on the other
side of it.
Of equal logits, the lower id comes first, as in plain torch.

`take_best` and `draw` read nothing back and wait for nothing, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from oaiserve.engine.model.sampler import GREEDY_BELOW, SampledIds, row_parameters
from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.model.triton_sampling_kernels import (
    NUM_FLOORS,
    best_kernel,
    best_of_chunk_kernel,
    candidates_kernel,
    draw_kernel,
    highest_kernel,
    mask_kernel,
    weights_kernel,
)
from oaiserve.engine.step import Chunk

CHUNK = 4096  # ids that one program processes
TILE = 2048  # candidates that a program processes at a time


def sample_ids(logits: torch.Tensor, chunks: list[Chunk]) -> SampledIds:
    """Sample a token for each row of `logits` [R, vocab], which are not changed."""
    if all(chunk.sequence.params.temperature < GREEDY_BELOW for chunk in chunks):
        return take_best(logits)
    rows = [row_parameters(chunk) for chunk in chunks]
    has_cuts = any(row.cuts(logits.shape[-1]) for row in rows)
    return draw(logits, on_device(rows, logits.device, torch.float32).T.contiguous(), has_cuts=has_cuts)


def apply_masks(logits: torch.Tensor, rows: list[int], words: np.ndarray) -> None:
    """Set rows of `logits` float32 [R, vocab] to -infinity where a bit is 0, see `logit_edits.ApplyMasks`.

    All masks go to the device in one copy.
    """
    assert logits.stride(1) == 1
    num_masks, num_words = words.shape
    masks = np.empty((num_masks, 1 + num_words), dtype=np.int32)
    masks[:, 0], masks[:, 1:] = rows, words.view(np.int32)
    mask_kernel[(num_masks, triton.cdiv(logits.shape[1], CHUNK))](
        logits,
        on_device(masks, logits.device, torch.int32),
        logits.stride(0),
        logits.shape[1],
        num_words,
        CHUNK=CHUNK,
    )


def take_best(logits: torch.Tensor, out: SampledIds | None = None) -> SampledIds:
    """Return the id of the highest logit of each row [R, vocab]; of several equal logits, the lowest id.

    `out` has the tensors that results are written to, both int64 [R].
    """
    logits, num_rows, vocab, num_chunks = _sizes(logits)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    token_ids, are_finite = out or _new_ids(logits)
    best_of_chunk_kernel[(num_rows, num_chunks)](logits, best, logits.stride(0), vocab, CHUNK=CHUNK)
    best_kernel[(num_rows,)](
        best, token_ids, are_finite, num_chunks, TILE_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return token_ids, are_finite


def draw(
    logits: torch.Tensor, parameters: torch.Tensor, *, has_cuts: bool, out: SampledIds | None = None
) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]. `parameters` are float32 [5, R], see `RowParameters`.

    Without `has_cuts`, their top_k and top_p are ignored. `out` has the tensors that results are written to, both
    int64 [R].
    """
    logits, num_rows, vocab, num_chunks = _sizes(logits)
    temperatures, min_ps, top_ks, top_ps, uniforms = parameters

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    highest, masses = empty(num_rows, num_chunks), empty(num_rows, num_chunks)
    token_ids, are_finite = out or _new_ids(logits)
    # The kernels use these only if top_k or top_p is applied.
    rows_of_cuts = num_rows if has_cuts else 0
    weights, candidate_weights = empty(rows_of_cuts, vocab), empty(rows_of_cuts, vocab)
    candidate_ids = empty(rows_of_cuts, vocab, dtype=torch.int32)
    num_candidates = empty(rows_of_cuts, dtype=torch.int32)
    floor_masses = empty(rows_of_cuts, num_chunks, NUM_FLOORS.value)
    floor_counts = empty(rows_of_cuts, num_chunks, NUM_FLOORS.value, dtype=torch.int32)
    tile_chunks = triton.next_power_of_2(num_chunks)

    highest_kernel[(num_rows, num_chunks)](logits, highest, logits.stride(0), vocab, CHUNK=CHUNK)
    weights_kernel[(num_rows, num_chunks)](
        logits,
        highest,
        temperatures,
        min_ps,
        masses,
        weights,
        floor_counts,
        floor_masses,
        logits.stride(0),
        vocab,
        HAS_CUTS=has_cuts,
        CHUNK=CHUNK,
        TILE_CHUNKS=tile_chunks,
        num_warps=8 if has_cuts else 4,
    )
    if has_cuts:
        candidates_kernel[(num_rows, num_chunks)](
            weights,
            masses,
            floor_counts,
            floor_masses,
            top_ks,
            top_ps,
            candidate_weights,
            candidate_ids,
            num_candidates,
            vocab,
            CHUNK=CHUNK,
            TILE_CHUNKS=tile_chunks,
            num_warps=8,
        )
    draw_kernel[(num_rows,)](
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
        token_ids,
        are_finite,
        logits.stride(0),
        vocab,
        num_chunks,
        HAS_CUTS=has_cuts,
        CHUNK=CHUNK,
        TILE_CHUNKS=tile_chunks,
        TILE=TILE,
        num_warps=8,
    )
    return token_ids, are_finite


def _sizes(logits: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return the logits with contiguous rows, and the numbers of rows, of ids, and of chunks in a row."""
    num_rows, vocab = logits.shape
    return logits if logits.stride(1) == 1 else logits.contiguous(), num_rows, vocab, triton.cdiv(vocab, CHUNK)


def _new_ids(logits: torch.Tensor) -> SampledIds:
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return token_ids, torch.empty_like(token_ids, dtype=torch.bool)
