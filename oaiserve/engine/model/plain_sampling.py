"""Draws in plain torch, for all rows at once on their device: where there is no Triton, and to compare with.

Rows with the same method are drawn together, so a greedy row does not cost what a drawn row does.
"""

from __future__ import annotations

import math

import torch

from oaiserve.engine.draws import FACTOR_1, FACTOR_2, NOISE_BITS
from oaiserve.engine.model.draw_rows import DrawRow, SampledIds, SampleIds, seeds
from oaiserve.engine.model.transfer import on_device

_MASK32 = (1 << 32) - 1


def sample_ids(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]."""
    indices_by_method: dict[SampleIds, list[int]] = {}
    for index, row in enumerate(rows):
        indices_by_method.setdefault(_method(row, logits.shape[-1]), []).append(index)
    if len(indices_by_method) == 1:
        (method,) = indices_by_method
        return method(logits, rows)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    are_finite = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
    for method, indices in indices_by_method.items():
        index = on_device(indices, logits.device)
        token_ids[index], are_finite[index] = method(logits[index], [rows[i] for i in indices])
    return token_ids, are_finite


def _method(row: DrawRow, vocab: int) -> SampleIds:
    return _take_best if row.is_greedy else _draw_from_best if row.cuts(vocab) else _draw


def _take_best(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    best, token_ids = logits.max(dim=-1)
    return token_ids, best.isfinite()


def _draw(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Draw from all ids."""
    scaled, are_finite = _scale(logits, rows)
    return (scaled + _noise(logits, rows)).argmax(dim=-1), are_finite


def _draw_from_best(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Draw from the ids that stay after top_k and then top_p. The id with which the sum reaches top_p is the last."""
    device, vocab = logits.device, logits.shape[-1]
    scaled, are_finite = _scale(logits, rows)
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    num_kept = _column([row.top_k or vocab for row in rows], device)
    weights = scaled.exp().masked_fill(torch.arange(vocab, device=device) >= num_kept, 0.0)
    before = weights.cumsum(dim=-1) - weights
    goal = weights.sum(dim=-1, keepdim=True) * _column([row.top_p for row in rows], device)
    is_kept = (weights > 0) & (before < goal)
    is_kept[:, 0] = True
    scores = (scaled + _noise(logits, rows).gather(1, order)).masked_fill(~is_kept, -torch.inf)
    return order.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0], are_finite


def _scale(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Return the logits less the highest one, divided by the temperature, and -infinity where min_p excludes an id.

    The result is float64 [R, vocab], and whether the logits are finite, bool [R].
    """
    logits = logits.double()
    highest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - highest) / _column([row.temperature for row in rows], logits.device)
    if any(row.min_p for row in rows):
        floors = [math.log(row.min_p) if row.min_p else -math.inf for row in rows]
        scaled = scaled.masked_fill(scaled < _column(floors, logits.device), -torch.inf)
    return scaled, highest.isfinite()[:, 0]


def _noise(logits: torch.Tensor, rows: list[DrawRow]) -> torch.Tensor:
    """Return `draws.noise` of all ids for each row: float64 [R, vocab]."""
    on_rows = on_device(seeds(rows), logits.device)[:, None]
    first, second = on_rows >> 32 & _MASK32, on_rows & _MASK32
    mixed = _mix32(torch.arange(logits.shape[-1], device=logits.device))
    high = (mixed ^ first) * FACTOR_1 & _MASK32
    high = ((high ^ high >> 15) + second) * FACTOR_2 & _MASK32
    high = high ^ high >> 16
    low = _mix32((high + mixed & _MASK32) ^ second)
    bits = high << NOISE_BITS - 32 | low >> 64 - NOISE_BITS
    return -(-(-((bits.double() + 0.5) * 2.0**-NOISE_BITS)).log1p()).log()


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Return `draws.mix32` of each number, which is the lower half of an int64."""
    x = x ^ x >> 16
    x = x * FACTOR_1 & _MASK32
    x = x ^ x >> 15
    x = x * FACTOR_2 & _MASK32
    return x ^ x >> 16


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    """Return the values as a column on the device: float64 [R, 1]."""
    return on_device(values, device, torch.float64)[:, None]
