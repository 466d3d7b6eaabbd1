"""The rows of draws, one by one and as columns of several."""

import numpy as np

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_rows import draw_columns, draw_row, parameters_of, seeds
from oaiserve.engine.sequences.noise import draw_key
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk

PARAMS = [
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40),
    SamplingParams(temperature=0.0, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.5, top_k=1),
    SamplingParams(temperature=1e-6),
]


def draws_of(params: list[SamplingParams]) -> list[Chunk]:
    sequences = [
        Sequence("r", index, [1, 2, 3], one, max_len=99, draw_key=draw_key(2**63 + index, index))
        for index, one in enumerate(params)
    ]
    chunks = [Chunk(sequence, 1000 * index, 1 + index) for index, sequence in enumerate(sequences)]
    return [draw for chunk in [*chunks, chunks[0].with_draft((4, 5))] for draw in chunk.draws()]


def test_columns_of_draws_are_those_of_their_rows() -> None:
    draws = draws_of(PARAMS)
    rows = [draw_row(draw.sequence, draw.end) for draw in draws]

    parameters, noise = draw_columns(draws)

    assert np.array_equal(parameters, parameters_of(rows))
    assert np.array_equal(noise, seeds(rows))
    assert [bool(seed) for seed in noise] == [True, False, True, True, False, True, True, True]
