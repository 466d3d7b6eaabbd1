"""Adapters are for linear layers, and for the model that a server has."""

from pathlib import Path

import pytest

from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import FAMILIES
from tests.engine.remembered import save
from tests.models.adapters import adaptable, write_adapter
from tests.models.decoders import random_model
from tests.models.described import described


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_are_adaptable_but_not_experts_and_the_output_head(family: str) -> None:
    loaded = described(random_model(FAMILIES[family]))
    if not loaded.state_shapes:  # adapters are refused for others
        assert loaded.decoder.adaptable() == adaptable(loaded.model)


@pytest.mark.compiler
def test_an_adapter_for_another_model_stops_the_start_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oaiserve.engine.start.ways.described.cpu_sizes", None)
    save(random_model(FAMILIES["llama"]), tmp_path / "model")
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (7, 8)})
    message = (
        f"--lora sql={tmp_path} cannot be used: '{tmp_path}/adapter_model.safetensors': its tensor .* has the shape"
    )
    with pytest.raises(StartupError, match=message):
        SimulatedEngine.from_pretrained(tmp_path / "model", device="cpu", lora=(f"sql={tmp_path}",))
