"""A draw as data: a row of logits and its `DrawRow` make a token id, and nothing else does. No torch.

A row need not be the last of a chunk: several positions of one sequence are as many rows.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from oaiserve.engine.sequences.noise import noise_seed
from oaiserve.engine.sequences.sequence import Sequence

GREEDY_BELOW = 1e-5  # a temperature below this is greedy


class DrawRow(NamedTuple):
    """The parameters of a draw, greedy if from the best id alone, in float32, which all samplers read.

    Each field but the seed is a column of a step's parameters. It has the name and the default of a field of
    `SamplingParams`. A new field is a new column for the host, the kernels and the inputs of CUDA graphs.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: float = 0.0  # 0: all ids stay
    top_p: float = 1.0  # 1: all ids stay
    seed: int = 0  # seed of the noise, see `noise`

    @property
    def is_greedy(self) -> bool:
        return self.top_k == 1


DRAW_COLUMNS = DrawRow._fields[:-1]  # all but the seed
GREEDY = DrawRow(top_k=1.0)
_columns_of = attrgetter(*DRAW_COLUMNS)


def draw_row(sequence: Sequence, position: int) -> DrawRow:
    """Return the parameters of the draw of the sequence's token at `position`."""
    params = sequence.params
    if params.temperature < GREEDY_BELOW:
        return GREEDY
    return DrawRow._make((*array("f", _columns_of(params)), noise_seed(sequence.draw_key, position)))


def parameters_of(rows: list[DrawRow]) -> np.ndarray:
    """Return the parameters of the rows, in the order of DRAW_COLUMNS: float32 [columns, R]."""
    return np.ascontiguousarray(np.array([row[:-1] for row in rows], np.float32).reshape(-1, len(DRAW_COLUMNS)).T)


def seeds(rows: list[DrawRow]) -> np.ndarray:
    """Return the 64-bit seeds of the rows as int64 [R]."""
    return np.array([row.seed for row in rows], np.uint64).view(np.int64)
