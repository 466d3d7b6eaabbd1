"""The start of models without a description: what is measured, what a folder is served with, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from oaiserve.checkpoints.source import ModelSource, find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.fallback import CachedForward, NoCache
from oaiserve.engine.model.model_config import refuse_unless_computable
from oaiserve.engine.start.measure import Measured, measure
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.ways.fallback import Fallback, load
from oaiserve.errors import StartupError
from tests.engine.doubles import new_world
from tests.engine.model.runners import greedy_answers
from tests.engine.remembered import save
from tests.models.decoders import generate, random_model
from tests.models.small_configs import config_of
from tests.models.wrappers import save_wrapper

OPTIONS: dict[str, Any] = {"device": "cpu", "max_running": 2, "max_step_tokens": 32, "cpu_threads": 1}


def measured_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Measured:
    return measure(CachedForward(random_model(config_of(name, **changes), dtype=dtype)))


def test_the_bytes_of_a_cache_are_those_of_its_tensors() -> None:
    llama = measured_of("llama", num_key_value_heads=2, head_dim=16, num_hidden_layers=3)
    assert llama.cache.per_token == pytest.approx(3 * 2 * 2 * 16 * 4, rel=0.02)  # in all layers, keys and values
    assert llama.cache.fixed < 10_000
    assert llama.vocab_size == 97
    mamba = measured_of("mamba", num_hidden_layers=40)
    assert mamba.cache.per_token < 8  # next to nothing
    assert mamba.cache.fixed > 40 * 128 * 4 * 4


@pytest.mark.parametrize(("name", "continues"), [("llama", True), ("falcon_h1", True), ("mamba", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_that_forgets_a_state_in_a_second_chunk_gets_single_tokens(
    name: str, continues: bool, dtype: torch.dtype
) -> None:
    assert measured_of(name, dtype, initializer_range=0.1).continues_chunks is continues


def test_much_rounding_in_16_bits_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("oaiserve.engine.start.measure.tolerance", lambda _: -1.0)  # beyond any difference
    assert measured_of("llama", torch.bfloat16).continues_chunks
    assert "--dtype float32 tells which" in caplog.text


@pytest.mark.parametrize("name", ["recurrent_gemma", "openai-gpt"])
def test_code_without_a_cache_of_each_sequence_is_refused(name: str) -> None:
    with pytest.raises(NoCache, match="returns no cache that it takes again"):
        measured_of(name)


def test_code_that_computes_other_logits_with_a_cache_is_refused() -> None:
    with pytest.raises(NoCache, match="computes other logits with its cache than without it"):
        measured_of("hrm_text")


def test_model_that_no_code_computes_is_refused_before_its_tokenizer(tmp_path: Path) -> None:
    AutoConfig.for_model("siglip").save_pretrained(tmp_path)
    for name in ("model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(b"\2\0\0\0\0\0\0\0{}" if name == "model.safetensors" else b"{}")
    request = StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS), new_world())
    with pytest.raises(StartupError, match="cannot be served: its text model needs images or audio"):
        Fallback().start(request)


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = random_model(config_of("nanochat"))
    next(model.parameters()).data[:] = torch.nan
    with pytest.raises(NoCache, match="its outputs are no finite numbers"):
        measure(CachedForward(model.eval()))


# -- a folder ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(config_of("nanochat", vocab_size=256)), tmp_path_factory.mktemp("nanochat"))


def started(source: ModelSource, **options: Any) -> Engine:
    chosen = EngineOptions(**OPTIONS | options)
    world = new_world()
    return Engine(EngineParts.of(Fallback().start(StartRequest(source, chosen, world)), chosen, runtime=world))


def test_a_folder_is_served_with_prefix_cache_and_without_drafts(folder: Path) -> None:
    prompts = [[*b"A cache of a model"], [*range(90)], [*b"A cache of a model"], [*range(90), 7, 9]]
    model = random_model(config_of("nanochat", vocab_size=256))
    with started(find_model(folder)) as engine:
        for _ in range(2):
            assert greedy_answers(engine, prompts, 9) == generate(model, prompts, 9)
        snapshot = engine.snapshot()
    assert snapshot.num_prefix_hits == 3 * 80  # the first of these prompts leaves a cache of its full blocks behind
    assert snapshot.num_drafts == 0
    assert engine.features["native_step"] == "transformers' own code computes the steps"


def test_the_text_model_of_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    wrapper = save_wrapper("gemma3n", tmp_path)
    prompts = [[5, 9, 3, 17], [7] * 12]
    with started(find_model(tmp_path)) as engine:
        assert greedy_answers(engine, prompts, 8) == generate(wrapper, prompts, 8)


def test_images_that_text_code_takes_no_positions_of_are_refused(tmp_path: Path) -> None:
    save_wrapper("qwen2_vl", tmp_path)
    with pytest.raises(StartupError, match="--no-media serves its text"):
        started(find_model(tmp_path))
    with started(find_model(tmp_path), media=False) as engine:
        assert engine.media == frozenset()


def test_requests_are_as_long_as_memory_has_room_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = started(find_model(folder), kv_cache_memory=200_000)
    assert 16 <= engine.max_model_len < 128
    assert "no request can be longer" in caplog.text
    assert started(find_model(folder), kv_cache_memory=200_000, max_model_len=100).max_model_len == 100
    with pytest.raises(StartupError, match="are left for at least 4 caches on cpu"):
        started(find_model(folder), kv_cache_memory=1000)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"lora": ("a=/tmp",)}, "--lora"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"quantize": "int8"}, "--quantize int8"),
        ({"exact": True}, "--exact"),
    ],
)
def test_options_that_need_code_of_ours_are_refused(folder: Path, options: dict[str, Any], flag: str) -> None:
    with pytest.raises(StartupError, match=f"^{flag} is not for '.*', which runs in transformers' own code.$"):
        started(find_model(folder), **options)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("t5"), "it is an encoder-decoder model"),
        (AutoConfig.for_model("clip"), "its text model needs images or audio"),
        (AutoConfig.for_model("vit"), "transformers has no text generation model of type 'vit'"),
    ],
)
def test_what_nothing_can_compute_is_refused(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(StartupError, match=f"^'x' cannot be served: {reason}"):
        refuse_unless_computable(config, "x")


def test_files_without_a_tensor_of_the_model_are_refused(tmp_path: Path) -> None:
    model = random_model(config_of("nanochat", vocab_size=256))
    tensors = model.state_dict()
    name = next(name for name in tensors if name.endswith("mlp.fc1.weight"))
    model.save_pretrained(tmp_path, state_dict={key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(StartupError, match=f"has no weights for 1 of the tensors .*, such as {name}"):
        load(StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS), new_world()), torch.device("cpu"))
