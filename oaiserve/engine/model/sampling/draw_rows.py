"""A draw as data: a row of logits and its `DrawRow` make a token id, and nothing else does.

A row need not be the last of a chunk: several positions of one sequence are as many rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.engine.sequences.noise import noise_seed
from oaiserve.engine.sequences.sequence import Sequence

GREEDY_BELOW = 1e-5  # a temperature below this is greedy

SampledIds = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [R], and whether the logits were finite, bool [R]


class DrawRow(NamedTuple):
    """The parameters of a draw, greedy if from the best id alone, in float32, which all samplers read."""

    temperature: float
    min_p: float
    top_k: float  # 0: all ids stay
    top_p: float  # 1: all ids stay
    seed: int  # seed of the noise, see `draws`

    @property
    def is_greedy(self) -> bool:
        return self.top_k == 1

    def cuts(self, vocab: int) -> bool:
        """Return whether top_k or top_p can exclude any of `vocab` ids from a non-greedy draw."""
        return not self.is_greedy and (0 < self.top_k < vocab or self.top_p < 1.0)


# A function that draws one id from each row of the logits [R, vocab], and leaves these unchanged.
SampleIds = Callable[[torch.Tensor, list[DrawRow]], SampledIds]

GREEDY = DrawRow(1.0, 0.0, 1.0, 1.0, 0)


def draw_row(sequence: Sequence, position: int) -> DrawRow:
    """Return the parameters of the draw of the sequence's token at `position`."""
    params = sequence.params
    if params.temperature < GREEDY_BELOW:
        return GREEDY
    wanted = (params.temperature, params.min_p, max(params.top_k, 0), params.top_p)
    temperature, min_p, top_k, top_p = array("f", wanted)
    return DrawRow(temperature, min_p, top_k, top_p, noise_seed(sequence.draw_key, position))


def numbers(rows: list[DrawRow]) -> np.ndarray:
    """Return all parameters of the rows but the seeds: float32 [4, R]."""
    return np.ascontiguousarray(np.array([row[:-1] for row in rows], np.float32).reshape(-1, 4).T)


def seeds(rows: list[DrawRow]) -> np.ndarray:
    """Return the 64-bit seeds of the rows as int64 [R]."""
    return np.array([row.seed for row in rows], np.uint64).view(np.int64)
