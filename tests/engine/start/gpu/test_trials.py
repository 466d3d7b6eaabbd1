"""What torch computes in place of kernels is used only if it is right here, and faster. The device is a CPU."""

from typing import Any

import pytest

from oaiserve.engine.executors.cuda import chunked_states
from oaiserve.engine.start.gpu import trials
from tests.engine.executors.cuda.step_runs import model_of
from tests.engine.model.steps import CPU
from tests.models.small_configs import config_of

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.executors.cuda import triton_states

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "STATE_ROWS", 66)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_chunks_of_tokens_are_used_if_they_are_right_and_faster(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model_of(config_of(family)).decoder.layers
    for taken, said in ((0.9e-6, ""), (2e-6, "torch takes 2 µs for what takes kernels 1 µs")):
        clock: Any = lambda run, taken=taken: 1e-6 if run.func is triton_states.recurrence else taken  # noqa: E731
        assert trials.state_chunks(layers, CPU, clock) == said
    right = chunked_states.chunked
    monkeypatch.setattr(trials, "chunked", lambda *given: 1.01 * right(*given))
    with pytest.raises(trials.Wrong, match=r"outputs would differ by 1\.0%"):
        trials.state_chunks(layers, CPU, clock)
    monkeypatch.setattr(trials, "chunked", lambda state, *given: right(state.clone(), *given))
    with pytest.raises(trials.Wrong, match="states would differ by "):
        trials.state_chunks(layers, CPU, clock)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_model_without_recurrences_has_none_to_use(family: str) -> None:
    layers = model_of(config_of(family)).decoder.layers
    assert trials.state_chunks(layers, CPU) == "no layer of the model has a state that prompts walk through"


def test_an_error_is_a_reason() -> None:
    assert trials.reason(RuntimeError("no kernel image is available")) == "RuntimeError: no kernel image is available"
    assert trials.reason(trials.Wrong("states would differ by 2.0%")) == "states would differ by 2.0%"
