"""Draws on the host, row by row in NumPy: a draw depends on the row's bytes and its `DrawRow` alone.

Neither other rows nor the number of threads can change an id: every sum is over one row, in an order that depends only
on the row. torch promises neither: it may round the end of a row differently, and split a sum by the number of threads.
NumPy narrows the ids down to a few that may have the highest score, which is computed as `noise` defines it, in
float64. This code runs on a CPU and on a GPU without Triton's kernels, and those kernels are compared with it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from oaiserve.engine.model.sampling.sampled_ids import SampledIds
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.sequences.noise import FACTOR_1, FACTOR_2, noise

# The bits of a positive float32, read as an integer and divided by 2**23, exceed its base-2 logarithm by 127, or by up
# to 0.09 less. These constants turn the bits of the hash into an upper bound of the noise.
_BOUND_SLOPE = np.float32(-math.log(2) / 2**23)
_BOUND_OFFSET = (127 + 32) * math.log(2)
# By how much rounding to float32 may change that bound plus a logit, for an id that can win: both are below 128.
_ROUNDING = 1e-4


def sample_ids(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]."""
    all_logits = np.ascontiguousarray(logits.float().cpu().numpy())
    token_ids = all_logits.argmax(axis=-1)  # the best ids, or the first NaN
    highest = all_logits[np.arange(len(rows)), token_ids]
    are_finite = np.isfinite(highest)
    drawn = [index for index, row in enumerate(rows) if not row.is_greedy and are_finite[index]]
    if drawn:
        with np.errstate(over="ignore"):  # the lowest float32, divided by a low temperature, is -infinity
            for index in drawn:
                token_ids[index] = _draw(all_logits[index], highest[index], rows[index])
    return torch.from_numpy(token_ids).to(logits.device), torch.from_numpy(are_finite).to(logits.device)


def _draw(logits: np.ndarray, highest: np.float32, row: DrawRow) -> int:
    """Draw an id from a row of logits float32 [vocab], finite or -infinity. `highest` is the best of them."""
    scaled = logits - highest
    scaled *= np.float32(1.0 / row.temperature)
    ids: np.ndarray | None = None  # ids that may be drawn; None: all
    if row.min_p:
        ids = np.flatnonzero(scaled >= np.float32(math.log(row.min_p)))
        scaled = scaled[ids]
    if 0 < row.top_k < len(scaled):
        stay = _places_of_highest(scaled, None, row.top_k)
        ids = stay if ids is None else ids[stay]
        scaled = scaled[stay]
    if row.top_p < 1.0:
        weights = np.exp(scaled)
        stay = _places_of_highest(scaled, weights, row.top_p * float(weights.sum(dtype=np.float64)))
        ids = stay if ids is None else ids[stay]
        scaled = scaled[stay]
    bounds = _noise_bounds(row.seed, _mixed_ids(len(logits)) if ids is None else _mixed(ids))
    bounds += scaled

    def score(place: int) -> tuple[float, int]:
        """Return the sort key of candidates: the score, then the lower id."""
        token_id = place if ids is None else int(ids[place])
        exactly_scaled = (float(logits[token_id]) - float(highest)) / row.temperature
        return exactly_scaled + noise(row.seed, token_id), -token_id

    least, _ = score(int(bounds.argmax()))
    may_win = np.flatnonzero(bounds >= np.float32(least - _BOUND_OFFSET - _ROUNDING))
    _, drawn = max(map(score, may_win.tolist()))
    return -drawn


def _places_of_highest(scaled: np.ndarray, weights: np.ndarray | None, goal: float) -> np.ndarray:
    """Return the places of the highest numbers whose weights reach the goal together, in ascending order.

    The numbers are at most 0. Without weights, each number counts as 1. Among equal numbers, the first ones are chosen.
    The numbers are put into buckets by the upper half of their bits, so that only the bucket in which the sum reaches
    the goal is sorted.
    """
    buckets = np.abs(scaled).view(np.uint32) >> np.uint32(16)
    sums = np.bincount(buckets, weights).cumsum()
    last_bucket = min(int(np.searchsorted(sums, goal)), len(sums) - 1)
    within = np.flatnonzero(buckets == last_bucket)
    within = within[np.argsort(-scaled[within], kind="stable")]
    before = sums[last_bucket - 1] if last_bucket else 0
    sums_within = before + (np.arange(1, len(within) + 1) if weights is None else weights[within].cumsum(dtype=float))
    stays = buckets < last_bucket
    stays[within[: int(np.searchsorted(sums_within, goal)) + 1]] = True
    return np.flatnonzero(stays)


def _noise_bounds(seed: int, mixed: np.ndarray) -> np.ndarray:
    """Return upper bounds float32 of the noise of ids, less `_BOUND_OFFSET`.

    `mixed` are the ids after `noise.mix32`. This continues like `noise.noise_bits`, up to the upper half.
    """
    bits = mixed ^ np.uint32(seed >> 32)
    bits *= np.uint32(FACTOR_1)
    bits ^= bits >> np.uint32(15)
    bits += np.uint32(seed & 0xFFFFFFFF)
    bits *= np.uint32(FACTOR_2)
    bits ^= bits >> np.uint32(16)
    bounds = bits.astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= _BOUND_SLOPE
    return bounds


@lru_cache(maxsize=1)
def _mixed_ids(vocab: int) -> np.ndarray:
    return _mixed(np.arange(vocab))


def _mixed(ids: np.ndarray) -> np.ndarray:
    """Return `noise.mix32` of each id: uint32."""
    x = ids.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(FACTOR_1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(FACTOR_2)
    x ^= x >> np.uint32(16)
    return x
