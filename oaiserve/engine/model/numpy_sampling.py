"""Draws on a CPU, row by row in NumPy: the row's bytes and its `DrawRow` decide, and nothing else.

Neither the other rows nor the number of threads can change an id. Every sum is over one row, in an order that follows
from the row, and everything else is done for each id by itself. torch promises neither: its functions may round the
numbers at the end of a row in another way than those within, and sum in as many parts as there are threads.

NumPy only narrows the ids down to a few that may have the highest score. The scores of these are computed by the
definition in `draws`, in float64.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from oaiserve.engine.draws import FACTOR_1, FACTOR_2, noise
from oaiserve.engine.model.draw_rows import DrawRow, SampledIds

# The bits of a positive float32, read as an integer and divided by 2**23, are 127 more than its logarithm to base 2 or
# up to 0.09 less than that. So these make of the bits of the hash an upper bound of the noise.
_BOUND_SLOPE = np.float32(-math.log(2) / 2**23)
_BOUND_OFFSET = (127 + 32) * math.log(2)
# By how much rounding to float32 may change that bound plus a logit, for an id that can win: both are below 128.
_ROUNDING = 1e-4


def sample_ids(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]."""
    all_logits = np.ascontiguousarray(logits.float().numpy())
    best_ids = all_logits.argmax(axis=-1)  # the first NaN, if there is one
    are_finite = np.isfinite(all_logits[np.arange(len(rows)), best_ids])
    token_ids = best_ids.copy()
    with np.errstate(over="ignore"):  # the lowest numbers of float32, divided by a low temperature, are -infinity
        for index, row in enumerate(rows):
            if are_finite[index] and not row.is_greedy:
                token_ids[index] = _draw(all_logits[index], all_logits[index, best_ids[index]], row)
    return torch.from_numpy(token_ids), torch.from_numpy(are_finite)


def _draw(logits: np.ndarray, highest: np.float32, row: DrawRow) -> int:
    """Draw an id from a row with these finite logits float32 [vocab], or -infinity, of which `highest` is one."""
    ids: np.ndarray | None = None  # those that stay; None: all
    if row.min_p:
        ids = np.flatnonzero(logits >= np.float32(float(highest) + row.temperature * math.log(row.min_p)))
        logits = logits[ids]
    if 0 < row.top_k < len(logits):
        places = _best(logits, int(row.top_k))
        ids, logits = places if ids is None else ids[places], logits[places]
    if row.top_p < 1.0:
        places = _best(logits, _count_by_top_p(logits, highest, row))
        ids, logits = places if ids is None else ids[places], logits[places]
    bounds = _noise_bounds(row.seed, _mixed_ids(len(logits)) if ids is None else _mixed(ids))
    bounds += _scaled(logits, highest, row)

    def score(place: int) -> tuple[float, int]:
        """Return what decides: the score, or the lower id of two with the same."""
        token_id = place if ids is None else int(ids[place])
        scaled = (float(logits[place]) - float(highest)) / row.temperature
        return scaled + noise(row.seed, token_id), -token_id

    first = score(int(bounds.argmax()))
    may_win = np.flatnonzero(bounds >= np.float32(first[0] - _BOUND_OFFSET - _ROUNDING))
    return -max(map(score, may_win.tolist()))[1]


def _scaled(logits: np.ndarray, highest: np.float32, row: DrawRow) -> np.ndarray:
    """Return the logits less the highest one, divided by the temperature: float32, at most 0."""
    scaled = logits - highest
    scaled *= np.float32(1.0 / row.temperature)
    return scaled


def _best(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the `count` highest logits in ascending order. Of equal ones, the first stay."""
    last = np.partition(logits, len(logits) - count)[len(logits) - count]
    places = np.flatnonzero(logits >= last)
    surplus = len(places) - count
    if surplus:
        equal = np.flatnonzero(logits[places] == last)
        places = np.delete(places, equal[-surplus:])
    return places


def _count_by_top_p(logits: np.ndarray, highest: np.float32, row: DrawRow) -> int:
    """Return how many of the highest logits top_p keeps. The one with which the sum reaches top_p is the last."""
    weights = np.exp(_scaled(logits, highest, row))
    total = float(weights.sum(dtype=np.float64))
    # All ids below this weight have less than 1 - top_p together. So the others reach top_p, and only they are sorted.
    floor = np.float32((1.0 - row.top_p) * total / len(logits))
    best_first = np.ascontiguousarray(np.sort(logits[weights >= floor])[::-1])
    sums = np.exp(_scaled(best_first, highest, row)).cumsum(dtype=np.float64)
    return min(int(np.searchsorted(sums, row.top_p * total)) + 1, len(sums))


def _noise_bounds(seed: int, mixed: np.ndarray) -> np.ndarray:
    """Return upper bounds of the noise of ids, less `_BOUND_OFFSET`: float32.

    `mixed` are the ids after `draws.mix32`, and this goes on as `draws.noise_bits` does up to the upper half.
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
    """Return `draws.mix32` of each id: uint32."""
    x = ids.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(FACTOR_1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(FACTOR_2)
    x ^= x >> np.uint32(16)
    return x
