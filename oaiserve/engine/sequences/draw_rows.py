"""The rows of parameters for draws: one row per position of a sequence, and the arrays of several rows. No torch.

A draw need not come at the end of a chunk: several positions of one sequence have a row each.
"""

from __future__ import annotations

from array import array

import numpy as np

from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS, GREEDY, DrawRow
from oaiserve.engine.sequences.noise import noise_seed, splitmix64
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk


def draw_row(sequence: Sequence, position: int) -> DrawRow:
    """Return the parameters of the draw of the sequence's token at `position`."""
    if sequence.is_greedy:
        return GREEDY
    return DrawRow._make((*sequence.draw_parameters, noise_seed(sequence.draw_key, position)))


def draw_columns(draws: list[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of `parameters_of` and `seeds` for draws that follow the last token of each chunk."""
    positions = array("Q", [draw[1] + draw[2] for draw in draws])
    keys = array("Q", [draw[0].draw_key for draw in draws])
    noise = splitmix64(np.frombuffer(keys, np.uint64), np.frombuffer(positions, np.uint64)).view(np.int64)
    noise[[row for row, draw in enumerate(draws) if draw[0].is_greedy]] = GREEDY.seed
    parameters = np.frombuffer(b"".join([draw[0].draw_parameters for draw in draws]), np.float32)
    return parameters.reshape(-1, len(DRAW_COLUMNS)).T, noise


def parameters_of(rows: list[DrawRow]) -> np.ndarray:
    """Return the parameters of the rows, in the order of DRAW_COLUMNS: float32 [columns, R]."""
    return np.ascontiguousarray(np.array([row[:-1] for row in rows], np.float32).reshape(-1, len(DRAW_COLUMNS)).T)


def seeds(rows: list[DrawRow]) -> np.ndarray:
    """Return the 64-bit seeds of the rows as int64 [R]."""
    return np.array([row.seed for row in rows], np.uint64).view(np.int64)
