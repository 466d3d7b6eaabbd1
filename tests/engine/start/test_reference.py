"""Models whose sizes native code does not take are served by the reference, unless they are described wrongly."""

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start import small_model
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.ways.expanded import start_on_cpu
from tests.engine.model.cpu.small_models import FAMILIES, config, make_model
from tests.engine.model.runners import PROMPTS, decode
from tests.models.adapters import merged, random_adapter
from tests.models.decoders import generate

pytestmark = pytest.mark.compiler
OPTIONS = EngineOptions(kv_blocks=64, cpu_threads=1, lora_dir=Path("unread"))
NARROW = config("gemma3_text", head_dim=8, sliding_window=70, query_pre_attn_scalar=8)
NO_BLOCKS = replace(OPTIONS, block_size=8)  # that native code takes


@pytest.mark.parametrize(("asked", "options"), [(NARROW, OPTIONS), (FAMILIES["qwen2_moe"], NO_BLOCKS)])
def test_it_serves_what_native_code_has_no_layout_for(asked: object, options: EngineOptions) -> None:
    model = make_model(asked)
    started = start_on_cpu(prepare(deepcopy(model)), options)
    assert isinstance(started.runner._executor, ReferenceExecutor)
    assert started.features["native_step"] == "PyTorch computes the steps; the log says why"
    adapter = random_adapter(started.adaptable, 1)
    started.runner.add_adapter(1, adapter)
    answers = decode(started.runner, PROMPTS, [0, 1, 0, 1], 4)
    for prompt, number, answer in zip(PROMPTS, [0, 1, 0, 1], answers, strict=True):
        assert answer == generate(merged(model, adapter) if number else model, [prompt], 4)[0]


def _with_window(decoder: Decoder, added: int) -> Decoder:
    """Return a decoder whose windows are longer."""
    layers = []
    for layer in decoder.layers:
        parameters = layer.attention.parameters
        if parameters.sliding_window is not None:
            parameters = replace(parameters, sliding_window=parameters.sliding_window + added)
        layers.append(replace(layer, attention=replace(layer.attention, parameters=parameters)))
    return replace(decoder, layers=layers)


def test_a_wrong_description_is_not_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    describe = small_model.describe
    monkeypatch.setattr(small_model, "describe", lambda *arguments: _with_window(describe(*arguments), 1))
    executor = start_on_cpu(prepare(make_model(NARROW)), OPTIONS).runner._executor
    assert isinstance(executor, EagerExecutor)
    assert executor._backend is ReferenceAttention
    assert "The reference does not run the model: its outputs differ by" in caplog.text


def test_it_computes_in_the_dtype_of_the_model() -> None:
    executor = start_on_cpu(prepare(make_model(NARROW, dtype=torch.bfloat16)), OPTIONS).runner._executor
    assert isinstance(executor, ReferenceExecutor)
    assert {blocks.dtype for cache in executor.caches.values() for blocks in cache} == {torch.bfloat16}


def test_its_weights_are_those_of_the_loaded_model() -> None:
    loaded: LoadedModel = prepare(make_model(NARROW))
    decoder = start_on_cpu(loaded, OPTIONS).runner._executor._decoder
    own = dict(loaded.model.named_parameters())
    assert decoder.embedding.data_ptr() == own["model.embed_tokens.weight"].data_ptr()
    assert decoder.layers[2].mlp.down.weight.data_ptr() == own["model.layers.2.mlp.down_proj.weight"].data_ptr()
