"""The rows of draws: those of sequences at their positions, and the arrays of several. No torch.

A row need not be the last of a chunk: several positions of one sequence are as many rows.
"""

from __future__ import annotations

from array import array
from operator import attrgetter

import numpy as np

from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS, GREEDY, DrawRow
from oaiserve.engine.sequences.noise import noise_seed
from oaiserve.engine.sequences.sequence import Sequence

GREEDY_BELOW = 1e-5  # a temperature below this is greedy
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
