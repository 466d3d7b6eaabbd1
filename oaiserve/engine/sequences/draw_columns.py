"""A draw as data: a token id depends only on a row of logits and its `DrawRow`. Stdlib only."""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any, NamedTuple

GREEDY_BELOW = 1e-5  # a temperature below this is greedy


class DrawRow(NamedTuple):
    """The parameters of a draw, in float32, as all samplers read them. A draw with a `top_k` of 1 is greedy.

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


def draw_parameters(params: Any) -> array[float]:
    """Return the columns of the draws of a sequence with these `SamplingParams`, as float32."""
    if params.temperature < GREEDY_BELOW:
        return array("f", GREEDY[:-1])
    return array("f", _columns_of(params))
