"""The choice of a first start on a GPU is estimated from what its trials launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.executors import fake_gpu

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_products
from oaiserve.plugins.cuda.start.trials import EXPERT_TILES, RUNS, TILES
from tools.gpu import choice
from tools.gpu.choice import estimated, models

pytestmark = pytest.mark.kernels

TRIED = sum(len(rows) * (1 + len(tiles)) for rows, tiles in TILES.items())
TRIED_OF_EXPERTS = sum(len(rows) * (1 + len(tiles)) for rows, tiles in EXPERT_TILES.items())
NUM_ROWS = sum(map(len, TILES))


@contextmanager
def noted_doubles() -> Iterator[Any]:
    """Replace kernels that Triton's interpreter runs, and yield what would be compiled."""
    found: set[tuple[Any, ...]] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_gpu, "VARIANTS", found)
        fake_gpu.replace_kernels(patch, [triton_products], torch.bfloat16)
        yield SimpleNamespace(counts=found)


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("8B in FP8", 4 * (TRIED + 3 * NUM_ROWS)),
        ("8B in 4 bits", 4 * (TRIED + NUM_ROWS)),
        ("gpt-oss 20B", 2 * TRIED_OF_EXPERTS),
    ],
)
def test_each_candidate_is_launched_with_each_matrix(name: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "noted_kernels", noted_doubles)
    clock, of_trials, of_start = estimated(models()[name])
    assert clock.launches == (RUNS + 2) * products
    assert {*of_start} - {*of_trials} == set()
    assert len(of_start) < len(of_trials) <= 16
    assert clock.seconds < 10
