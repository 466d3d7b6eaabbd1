"""Models start from descriptions of their files, and answer as transformers' code does."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.checkpoints.adapters import read_adapter
from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.adapters import load_adapter
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.ways.described import FromDescription
from oaiserve.errors import StartupError
from tests.engine.doubles import new_world
from tests.engine.executors.native.small_models import FAMILIES, config, make_model
from tests.engine.model.runners import greedy, greedy_answers
from tests.engine.remembered import OPTIONS, answer, save, started
from tests.models.adapters import merged, write_adapter
from tests.models.decoders import byte_tokenizer, generate
from tests.models.small_configs import config_of
from tests.models.wrappers import save_wrapper

pytestmark = pytest.mark.compiler
PROMPT = [5, 9, 3, 17]
MODELS = {
    **{name: FAMILIES[name] for name in ("llama", "gpt2", "mixtral", "deepseek_v3", "gemma4_text", "qwen3_5_text")},
    "mamba2": FAMILIES["mamba2"],
    "kimi_linear": config_of("kimi_linear", num_experts=8),
    "layers by number": config_of("bamba", num_hidden_layers=6, attn_layer_indices=[2, 4]),
    "experts in every other layer": config_of(
        "ernie4_5_moe", num_hidden_layers=6, moe_layer_interval=2, moe_layer_start_index=1
    ),
}
# Native code has no layout for its heads.
NARROW = config("gemma3_text", head_dim=8, sliding_window=6, query_pre_attn_scalar=8)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "--no-compile"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_transformers(name: str, is_native: bool, tmp_path: Path, empty_cache: Path) -> None:
    model = make_model(MODELS[name])
    save(model, tmp_path)
    with started(tmp_path, **OPTIONS, compile=is_native) as engine:
        assert (engine.features["native_step"] == "") == is_native
        assert greedy_answers(engine, [PROMPT]) == generate(model, [PROMPT], 12)


@pytest.mark.parametrize("name", ["aria", "gemma3n", "llama4"])
def test_text_models_of_multimodal_checkpoints_are_described(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    text = save_wrapper(name, tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with started(tmp_path, **OPTIONS, media=False) as engine:
        assert greedy_answers(engine, [PROMPT]) == generate(text, [PROMPT], 12)
    assert "The model starts from a description of its files" in caplog.text


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (FAMILIES["llama"], {}),
        (FAMILIES["llama"], {"compile": False}),
        (NARROW, {}),
        (FAMILIES["qwen2_moe"], {"block_size": 8}),  # blocks that native code doesn't take
    ],
    ids=["native", "--no-compile", "narrow heads", "small blocks"],
)
def test_adapters_answer_as_if_merged(asked: Any, options: dict[str, Any], tmp_path: Path, empty_cache: Path) -> None:
    model = make_model(asked)
    save(model, tmp_path / "model")
    modules = ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.v_proj")
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in modules}
    folder = write_adapter(tmp_path / "adapter", shapes, rank=3)
    adapter = load_adapter("small", read_adapter(folder), shapes, torch.float32, torch.device("cpu"))
    with started(tmp_path / "model", **OPTIONS, **options, lora=(f"small={folder}",), lora_dir=tmp_path) as engine:
        engine.load_adapter("other", folder)
        for name, expected in (("small", merged(model, adapter)), (None, model), ("other", merged(model, adapter))):
            (actual,) = engine.generate([PROMPT], greedy(12), adapter=name)
            assert [actual.token_ids] == generate(expected, [PROMPT], 12)


def test_plain_pytorch_computes_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    save(make_model(NARROW, dtype=torch.bfloat16), tmp_path)
    served = FromDescription().start(StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS), new_world()))
    executor: Any = served.runner.executor
    assert isinstance(executor, ReferenceExecutor)
    assert {blocks.dtype for cache in executor.caches.values() for blocks in cache} == {torch.bfloat16}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_device_stores_latent_vectors_in_place_of_keys_and_values(tmp_path: Path, device: str) -> None:
    save(make_model(FAMILIES["deepseek_v3"]), tmp_path)
    options = EngineOptions(compile=False)
    found = describe_model(find_model(tmp_path), options, device=torch.device(device))
    attention = [layer.attention for layer in found.decoder.layers]
    widths = {0 if one is None else one.shape.latent_dim for one in attention}
    assert {shape.latent_dim for shape in found.spec.kv_shapes.values()} == widths
    assert 0 not in widths
    in_fp8 = replace(options, kv_cache_dtype="fp8")
    with pytest.raises(StartupError, match="has latent vectors"):
        describe_model(find_model(tmp_path), in_fp8, device=torch.device(device))


def test_a_cache_in_eight_bits_has_more_blocks(
    tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    save(make_model(FAMILIES["llama"]), tmp_path)
    options = OPTIONS | {"kv_cache_dtype": "int8", "kv_blocks": None, "kv_cache_memory": 2**20}
    assert len(answer(tmp_path, **options)[0]) == 12
    # A token has 3 layers with 2 heads of 16 + 16 numbers, and 2 scales for each head. A block has 16 tokens.
    num_blocks = 2**20 // (16 * 3 * 2 * (16 + 16 + 2 * 4))
    assert f": {num_blocks} KV blocks of 16 tokens (0.00 GiB in int8)" in caplog.text


def test_a_model_whose_outputs_are_nan_is_refused(tmp_path: Path, empty_cache: Path) -> None:
    model = make_model(FAMILIES["llama"])
    with torch.no_grad():
        model.base_model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    save(model, tmp_path)
    with pytest.raises(Declined, match="^its outputs are no finite numbers$"):
        FromDescription().start(StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS), new_world()))
    with pytest.raises(StartupError):
        answer(tmp_path, **OPTIONS)


def test_a_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    with pytest.raises(StartupError, match="--max-model-len is 4096, but the model is good for 128 tokens"):
        answer(tmp_path, **OPTIONS, max_model_len=4096)
