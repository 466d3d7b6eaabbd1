"""Weights that are quantized here are as near as blocks allow, and the same however many threads do it."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oaiserve.engine.decoder.blocks import FORMATS
from oaiserve.engine.executors.native.encoder import Encoder
from oaiserve.engine.executors.native.library import Library
from tests.engine.executors.native.small_models import compiled_for

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
IQ4_NL = 20
Q5_1 = 7
Q8_0 = 8
KINDS = [IQ4_NL, Q5_1, Q8_0]
CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


@pytest.fixture(scope="module", params=["native", "x86-64-v3"])
def library(request: pytest.FixtureRequest) -> Library:
    with compiled_for(request.param):
        return Library(torch.float32)


def random_weights(n: int = 24, k: int = 128) -> torch.Tensor:
    """Return weights as matrices of models have them: most of them small, some columns with larger ones."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, k, generator=generator) * 0.02 * (1 + 3 * torch.rand(k, generator=generator) ** 4)


def importance(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * (x**2).mean(-1, keepdims=True) + x**2


def error(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the error of each block, in which large weights count more."""
    return (importance(x) * (x - y) ** 2).sum(-1)


def steps_at_best(x: NDArray[np.float64], last: int) -> NDArray[np.float64]:
    """Return blocks between their extremes in `last` steps, fitted to as many scales and minimums as seem useful."""
    low = np.minimum(x.min(-1, keepdims=True), 0)
    high = np.maximum(x.max(-1, keepdims=True), 0)
    best = np.zeros_like(x)
    least = np.full(len(x), np.inf)
    for tried in np.linspace(last - 1, last + 1, 17):
        q = np.clip(np.rint((x - low) * tried / (high - low)), 0, last)
        for row in range(len(x)):
            root = np.sqrt(importance(x[row]))
            terms = np.stack([q[row], np.ones(32)], 1) * root[:, None]
            scale, minimum = np.linalg.lstsq(terms, x[row] * root, rcond=None)[0].astype(np.float16).astype(float)
            fitted = q[row] * scale + minimum
            if (result := error(x[row], fitted)) < least[row]:
                best[row] = fitted
                least[row] = result
    return best


def codebook_at_best(x: NDArray[np.float64]) -> NDArray[np.float64]:
    best = np.zeros_like(x)
    least = np.full(len(x), np.inf)
    for row, block in enumerate(x):
        for end in (*np.arange(-135, -118), *np.arange(119, 136)):
            scaled = block * end / block[np.abs(block).argmax()]
            entries = CODEBOOK[np.abs(scaled[:, None] - CODEBOOK).argmin(1)]
            weighted = importance(block) * entries
            fitted = entries * float(np.float16((weighted * block).sum() / (weighted * entries).sum()))
            if (result := error(block, fitted)) < least[row]:
                best[row] = fitted
                least[row] = result
    return best


def test_errors_are_those_of_a_plain_search(library: Library) -> None:
    weights = random_weights()
    blocks = weights.double().numpy().reshape(-1, 32)
    references = {IQ4_NL: codebook_at_best(blocks), Q5_1: steps_at_best(blocks, 31)}
    for kind, reference in references.items():
        result = Encoder(library, 2)(weights, kind).expand().double().numpy().reshape(-1, 32)
        # Where two scales are as good as each other, either may be taken.
        np.testing.assert_allclose(error(blocks, result).sum(), error(blocks, reference).sum(), rtol=2e-3)
        assert (error(blocks, result) <= 1.05 * error(blocks, reference) + 1e-12).all()


def test_eight_bits_are_rounded_to_the_nearest(library: Library) -> None:
    weights = random_weights()
    result = Encoder(library, 1)(weights, Q8_0).expand()
    steps = weights.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    # The scale in 16 bits adds a little to half of a step.
    assert ((result - weights).unflatten(1, (-1, 32)).abs() <= 0.57 * steps).all()


def test_a_search_loses_less_than_rounding(library: Library) -> None:
    """Fifteen even steps between the largest weight of a block and its negative take as many bits."""
    weights = random_weights(64, 256)
    blocks = weights.unflatten(1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 7
    plain = (blocks / step).round() * step
    result = Encoder(library, 2)(weights, IQ4_NL).expand().unflatten(1, (-1, 32))
    assert (result - blocks).square().mean() < 0.9 * (plain - blocks).square().mean()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: FORMATS[kind].name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_are_the_same_with_any_number_of_threads(library: Library, kind: int, dtype: torch.dtype) -> None:
    weights = random_weights(90, 64).to(dtype)
    alone, together = (Encoder(library, threads)(weights, kind) for threads in (1, 3))
    assert (alone.data == together.data).all()
    assert (alone.data == Encoder(library, 2)(weights.float(), kind).data).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: FORMATS[kind].name)
def test_blocks_with_few_different_weights_are_exact_or_near(library: Library, kind: int) -> None:
    rows = torch.zeros(6, 32)
    rows[1] = 0.5
    rows[2, 3] = -0.25
    rows[3, :16] = 0.125
    rows[4] = -1e-3
    rows[5] = 1000.0
    result = Encoder(library, 1)(rows, kind).expand()
    assert torch.equal(result[0], rows[0])
    assert ((result - rows).abs() <= 0.01 * rows.abs().amax(1, keepdim=True)).all()
