"""What torch computes in place of kernels is used only if it is right here, and faster. The device is a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.plugins.cuda.executor import chunked_states
from oaiserve.plugins.cuda.start import trials
from tests.engine.model.steps import CPU
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import model_of

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_states

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


def test_the_device_is_timed_with_all_runs_in_its_queue_and_nothing_in_its_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    milliseconds = iter([5.0, 3.0, 4.0, 9.0, 6.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: object) -> float:
            assert log[-1] == "waits"
            return next(milliseconds)

    flushed = SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flushed)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("waits"))
    assert trials.seconds_on_device(lambda: log.append("run")) == 3e-3
    assert log == ["run", "sleep", *["flush", "event", "run", "event"] * trials.RUNS, "waits"]
