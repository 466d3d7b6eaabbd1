"""Real files are described rightly, and a wrong description of them differs from transformers' code."""

from pathlib import Path

import pytest

from oaiserve.checkpoints import demo
from oaiserve.engine.start.layer_comparison import LIMIT
from tests.real.mutants import MUTANTS, RealModel, real_model

# A mistake that differs here also differs in the whole text, whose logits take seconds with a large vocabulary.
NUM_TOKENS = 32


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
    is_of_window = "window" in name
    if is_of_window and not model.has_windows:
        return
    compared = model if is_of_window else model.beginning(NUM_TOKENS)
    assert not all(part.is_right for part in compared.differences(MUTANTS[name]))


def test_the_right_description_is_right_in_the_first_tokens(model: RealModel) -> None:
    assert all(part.is_right for part in model.beginning(NUM_TOKENS).differences(lambda decoder: decoder))
