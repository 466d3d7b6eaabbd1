"""The native step is compiled if it has to be, and does not start at all if its results would be wrong."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.model.cpu import build
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.runner import ModelRunner
from tests.engine.model.cpu.small_models import FAMILIES, WITHOUT_STEP, load, native, started_runner
from tests.engine.model.runners import greedy_answers, make_engine
from tests.models.small_configs import config_of

pytestmark = pytest.mark.compiler
SLOWER = "The model runs without native code, which is slower: "


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(FAMILIES["llama"])


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [text for name, at, text in caplog.record_tuples if name.startswith("oaiserve") and at >= level]


def answer(loaded: LoadedModel, runner: ModelRunner) -> list[int]:
    with make_engine(loaded, runner) as engine:
        return greedy_answers(engine, [[5, 9, 3, 17]], 20)[0]


@pytest.mark.parametrize(
    ("asked", "logged"),
    [(FAMILIES["llama"], "The native step is ready after "), (WITHOUT_STEP, "Attention runs natively after ")],
)
def test_a_start_compiles_the_library_and_the_next_one_finds_it_on_disk(
    asked: PreTrainedConfig,
    logged: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = load(asked)
    caplog.set_level(logging.DEBUG)
    library, compiled = build.build(torch.float32), tmp_path / "compiled"
    compiler = tmp_path / "copying-g++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ for out; do :; done; echo >> {compiled}; cp {library} "$out"; }}\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path))
    answers = []
    for _ in range(2):
        answers.append(answer(loaded, started_runner(loaded)))
        assert lines(caplog, logging.DEBUG)[-1].startswith(logged)
        assert compiled.read_text() == "\n"
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "g++-99", "the compiler g++-99 that CXX names was not found"),
        ("CXX", "false", "false failed: no message"),
        ("PATH", "/nowhere", "no C++ compiler was found (install g++)"),
        ("OAISERVE_CACHE", "/dev/null/cache", "/dev/null/cache/native cannot be written: Not a directory"),
    ],
)
def test_a_failed_compilation_is_logged_in_one_line_and_requests_are_answered(
    loaded: LoadedModel,
    tmp_path: Path,
    variable: str,
    value: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    runner = started_runner(loaded)
    (line,) = lines(caplog, logging.DEBUG)
    assert line.startswith(SLOWER)
    assert line.endswith(reason)
    monkeypatch.undo()
    assert len(answer(loaded, runner)) == 20


def test_a_model_that_computes_more_than_its_modules_show_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    loaded = load(FAMILIES["llama"])
    compute = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: compute(self, x) * 1.01)
    with pytest.raises(NotKnown, match=r"^its outputs differ by \d+\.\d% from those of transformers' code$"):
        native(loaded)
    caplog.clear()
    started_runner(loaded)
    line, attention = lines(caplog, logging.DEBUG)
    assert line.startswith(f"{SLOWER}its outputs differ by ")
    assert attention.startswith("Attention runs natively after ")
    monkeypatch.undo()
    native(loaded)


def test_a_model_that_differs_only_at_distant_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(FAMILIES["llama"])
    attend = LlamaAttention.forward

    def louder_from_100_on(self: Any, hidden_states: Tensor, **arguments: Any) -> Any:
        factor = 1 + 0.1 * (arguments["position_ids"] >= 100)[..., None]
        arguments["position_embeddings"] = tuple(table * factor for table in arguments["position_embeddings"])
        return attend(self, hidden_states, **arguments)

    monkeypatch.setattr(LlamaAttention, "forward", louder_from_100_on)
    with pytest.raises(NotKnown, match="its outputs differ by"):
        native(loaded)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bamba", {"attn_layer_indices": [2, 4]}),  # numbers of layers
        ("qwen3_moe", {"mlp_only_layers": [2], "head_dim": 32}),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 1}),  # what no setting says of each layer
    ],
)
def test_a_model_keeps_its_native_step_whatever_its_settings_say_of_layers(name: str, settings: dict[str, Any]) -> None:
    native(load(config_of(name, num_hidden_layers=6, **settings)))


def test_a_model_whose_outputs_are_nan_is_refused() -> None:
    loaded = load(FAMILIES["llama"])
    with torch.no_grad():
        loaded.model.base_model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(NotKnown, match="its outputs are no finite numbers"):
        native(loaded)


def test_an_error_in_the_models_code_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(FAMILIES["llama"])
    loaded.model.base_model.rotary_emb.forward = lambda x, position_ids: 1 / 0
    started_runner(loaded)
    (record,) = [record for record in caplog.records if record.name.startswith("oaiserve")]
    assert record.getMessage() == f"{SLOWER}its code could not be read"
    assert record.exc_info[0] is ZeroDivisionError
