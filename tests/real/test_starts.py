"""Real files are described rightly, and a wrong description of them differs from transformers' code."""

from pathlib import Path

import pytest

from oaiserve.checkpoints import demo
from oaiserve.engine.start.layer_comparison import LIMIT
from tests.real.mutants import MUTANTS, RealModel, real_model


@pytest.fixture(scope="module")
def smollm() -> Path:
    return demo.fetched()


@pytest.fixture(scope="module", params=["smollm", "gemma_270m", "qwen_05b"])
def model(request: pytest.FixtureRequest) -> RealModel:
    return real_model(request.getfixturevalue(request.param))


def test_the_right_description_differs_by_much_less_than_is_allowed(model: RealModel) -> None:
    result = [*model.differences(lambda decoder: decoder)]
    assert len(result) == len(model.described.decoder.layers) + 1
    assert max(part.apart for part in result) < LIMIT / 5


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_description_differs(name: str, model: RealModel) -> None:
    if "window" in name and not model.has_windows:
        return
    assert not all(part.is_right for part in model.differences(MUTANTS[name]))
