"""Real files start with default settings in the native step, and a wrong description of them is refused."""

from pathlib import Path

import pytest

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start import small_model
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE
from oaiserve.files import demo
from tests.real.mutants import MUTANTS, OPTIONS, captured, has_windows

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def smollm() -> Path:
    return demo.fetched()


@pytest.fixture(scope="module", params=["smollm", "gemma_270m", "qwen_05b", "qwen_15b"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return captured(request.getfixturevalue(request.param))


def test_the_right_description_differs_by_much_less_than_is_allowed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "FLOAT32_TOLERANCE", FLOAT32_TOLERANCE / 5)
    small_model._refuse_unless_described(loaded, OPTIONS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_description_is_refused(name: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if "window" in name and not has_windows(loaded):
        return
    describe = small_model.describe
    monkeypatch.setattr(small_model, "describe", lambda *arguments: MUTANTS[name](describe(*arguments)))
    with pytest.raises(NotKnown, match="its outputs differ"):
        small_model._refuse_unless_described(loaded, OPTIONS)
