"""Models start from descriptions of their files, and answer as when transformers' modules are read."""

import logging
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from oaiserve.config import EngineOptions
from oaiserve.engine.start import plan
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.ways.described import FromDescription
from oaiserve.errors import StartupError
from oaiserve.files.source import find_model
from tests.engine.model.cpu.small_models import DELTA, FAMILIES, GROUPED_MOE, LATENT, config, make_model
from tests.engine.remembered import answer, save
from tests.models.decoders import generate
from tests.models.in_blocks import MIX, TOKENIZER, TOKENS, WIDE, file_of, written
from tests.models.packed import Packing
from tests.models.small_configs import config_of

pytestmark = pytest.mark.compiler
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1}


def described_answer(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_ways", lambda _: [FromDescription()])
        return answer(path, **OPTIONS | options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3", "gemma4_text", "qwen3_5_text", "mamba2"])
def test_answers_are_the_same(family: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_model(FAMILIES[family]), tmp_path)
    assert described_answer(tmp_path, monkeypatch) == answer(tmp_path, **OPTIONS)


def test_answers_are_the_same_with_a_cache_in_eight_bits(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    found = described_answer(tmp_path, monkeypatch, kv_cache_dtype="int8")
    assert found == answer(tmp_path, **OPTIONS, kv_cache_dtype="int8")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_answers_of_a_gguf_file_are_the_same(
    kind: Kind, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(config("llama", **WIDE | {"vocab_size": len(TOKENS)}), tmp_path, MIX, kind, tokenizer=TOKENIZER)
    assert described_answer(path, monkeypatch) == answer(path, **OPTIONS)


def test_answers_of_packed_weights_are_the_same(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, Packing("awq"))
    assert described_answer(tmp_path, monkeypatch) == answer(tmp_path, **OPTIONS)


# What native code has no operations or no layout for.
ODD_SIZES = {
    "narrow heads": config("gemma3_text", head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "an odd width": config("llama", hidden_size=72),
    "narrow states": config("qwen3_5_text", **DELTA | {"linear_key_head_dim": 8}),
    "small latent vectors": config(
        "deepseek_v3",
        **LATENT | {"qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 40},
        **GROUPED_MOE,
        num_experts_per_tok=3,
    ),
}


@pytest.mark.parametrize("name", ODD_SIZES)
def test_models_of_odd_sizes_run_in_plain_pytorch(
    name: str,
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    model = make_model(ODD_SIZES[name])
    save(model, tmp_path)
    assert described_answer(tmp_path, monkeypatch) == generate(model, [[5, 9, 3, 17]], 12)
    assert "The model runs in plain PyTorch, which is slower: " in caplog.text
    with pytest.raises(Declined, match="no multiples? of 16"):
        FromDescription().start(StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS, exact=True)))


def test_a_type_without_a_description_is_left_to_other_ways(tmp_path: Path) -> None:
    save(make_model(config_of("gemma3n_text")), tmp_path)
    request = StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS))
    way = FromDescription()
    assert way.accepts(request) is None
    with pytest.raises(Declined, match="models of type 'gemma3n_text' have no description"):
        way.start(request)


def test_a_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    request = StartRequest(find_model(tmp_path), EngineOptions(**OPTIONS, max_model_len=4096))
    with pytest.raises(StartupError, match="--max-model-len is 4096, but the model is good for 128 tokens"):
        FromDescription().start(request)
