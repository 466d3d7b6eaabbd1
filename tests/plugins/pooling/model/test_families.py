"""Vectors and scores equal those of transformers, one text at a time, for random models of each family."""

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForTextEncoding, Gemma2Config, Gemma3TextConfig, T5Config

from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import PairPrompt, Pooled, Prompt, Request, SamplingParams, TextPrompt
from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model import packed_check
from oaiserve.plugins.pooling.model.attention import packed_attention
from oaiserve.plugins.pooling.model.linear import OneDnnLinear
from oaiserve.plugins.pooling.model.load import load_pooler, prepare_pooler
from tests.models.decoders import SMALL, random_model
from tests.models.poolers import ENCODERS, FAMILIES, logits, random_pooler, save, vectors, word_tokenizer
from tests.plugins.pooling.model.started import started

_RANDOM = random.Random(1)
# Texts of various lengths, some equal, and some longer than a step.
TEXTS = [
    " ".join(_RANDOM.choice(["aa", "ab", "zz", "cat", "b", "ad"]) for _ in range(number))
    for number in (1, 7, 7, 2, 40, 1, 7, 100, 3)
]
PAIRS = [("aa ab", text) for text in TEXTS] + [(TEXTS[1], "ad"), (TEXTS[4], TEXTS[2])]


def pooled(engine: Engine, prompts: Sequence[Prompt]) -> np.ndarray:
    """Return the engine's result for each prompt."""
    request = Request("r", tuple(prompts), SamplingParams(max_tokens=0))
    vectors = {event.index: np.array(event.vector) for event in engine.stream(request) if isinstance(event, Pooled)}
    return np.stack([vectors[index] for index in range(len(prompts))])


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)


# How vectors are pooled does not depend on the layers before it: all ways with one encoder and one decoder, and each
# family with one way.
MODES = ("mean", "cls", "lasttoken")
RARE_MODES = ("max", "weightedmean", "mean_sqrt_len_tokens")
FAMILIES_AND_MODES = dict.fromkeys(
    [
        *product(("bert", "qwen3"), MODES),
        *zip(FAMILIES, cycle(MODES), strict=False),
        *product(["bert"], RARE_MODES),
    ]
)


@pytest.mark.parametrize(("family", "mode"), FAMILIES_AND_MODES)
def test_vectors_equal_those_of_each_text_alone(family: str, mode: str, tmp_path: Path) -> None:
    model = random_pooler(FAMILIES[family])
    expected = vectors(model, word_tokenizer(family, model.config.vocab_size), TEXTS, mode)
    assert (cosines(expected[:1], expected[1:]) < 0.999).all(), "the vectors must be able to differ"
    folder = save(tmp_path, family, model, pooling=mode)
    for max_step_tokens in (16, 512):
        with started(folder, max_running=16, max_step_tokens=max_step_tokens, device="cpu") as engine:
            actual_vectors = pooled(engine, [TextPrompt(text) for text in TEXTS])
        assert (engine.pooling.task, engine.pooling.size) == ("embed", 32)
        assert cosines(actual_vectors, expected).min() >= 0.9999


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_sigmoid_of_each_pairs_logit(family: str, tmp_path: Path) -> None:
    model = random_pooler(FAMILIES[family], "score")
    expected = logits(model, word_tokenizer(family, model.config.vocab_size), PAIRS)
    assert max(expected) - min(expected) > 0.1, "the scores must be able to differ"
    with started(save(tmp_path, family, model), max_running=8, max_step_tokens=64) as engine:
        vectors = pooled(engine, [PairPrompt(*pair) for pair in PAIRS])
    assert engine.pooling.task == "score"
    np.testing.assert_allclose(vectors[:, 0], torch.tensor(expected).sigmoid().numpy(), atol=2e-4)


@pytest.mark.parametrize("file", ["config.json", "config_sentence_transformers.json"])
def test_a_config_can_leave_scores_as_they_are(file: str, tmp_path: Path) -> None:
    model = random_pooler(FAMILIES["bert"], "score")
    stated = {"activation_fn": "torch.nn.modules.linear.Identity"}
    if file == "config.json":
        model.config.sentence_transformers = stated
    expected = logits(model, word_tokenizer("bert", model.config.vocab_size), PAIRS)
    folder = save(tmp_path, "bert", model)
    if file != "config.json":
        (folder / file).write_text(json.dumps({"model_type": "CrossEncoder", **stated}))
    with started(folder) as engine:
        vectors = pooled(engine, [PairPrompt(*pair) for pair in PAIRS])
    np.testing.assert_allclose(vectors[:, 0], expected, atol=2e-4)


def test_adapters_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, "bert", random_pooler(FAMILIES["bert"]))
    with pytest.raises(
        StartupError, match=r"--lora-dir is for models that generate text, and '.*' is for --task embed"
    ):
        started(folder, lora_dir=tmp_path)


# oneDNN has no bfloat16 for CPUs without AVX-512 or AVX-NE-CONVERT: torch's own layers stay.
ONEDNN_PACKS = {"float32": True, "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported()}


@pytest.mark.parametrize("dtype", ONEDNN_PACKS)
def test_linear_layers_are_packed_where_onednn_can_unless_compile_is_off(dtype: Any, tmp_path: Path) -> None:
    folder = save(tmp_path, "bert", random_pooler(FAMILIES["bert"]), pooling="mean")
    ids = [5, 9, 30, 7, 8, 9]
    lengths = [2, 4]
    results = []
    for compiles in (False, True):
        pooler = load_pooler(folder, "embed", EngineOptions(compile=compiles, dtype=dtype))
        is_packed = any(isinstance(module, OneDnnLinear) for module in pooler.model.modules())
        assert is_packed == (compiles and ONEDNN_PACKS[dtype])
        results.append(pooler.pool(ids, [0] * 6, lengths).numpy())
    assert cosines(*results).min() >= (0.9999 if dtype == "float32" else 0.99)


def test_a_window_is_computed_in_bands(tmp_path: Path) -> None:
    """This text is longer than the queries that share a mask."""
    config = copy.deepcopy(FAMILIES["modernbert"])
    config.max_position_embeddings = 1024
    model = random_pooler(config)
    text = " ".join(["aa", "zz", "b"] * 200)
    expected = vectors(model, word_tokenizer("modernbert", config.vocab_size), [text], "mean")
    with started(save(tmp_path, "modernbert", model, pooling="mean")) as engine:
        assert cosines(pooled(engine, [TextPrompt(text)]), expected)[0] >= 0.9999


@pytest.mark.parametrize("off_by", [0, 1])
def test_a_start_finds_that_a_window_is_wrong(
    off_by: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EmbeddingGemma has this window."""

    def with_wrong_window(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
        window = None if sliding_window is None else sliding_window + off_by
        return packed_attention(*args, sliding_window=window, **kwargs)

    monkeypatch.setattr(packed_check, "packed_attention", with_wrong_window)
    config = Gemma3TextConfig(
        **SMALL | {"max_position_embeddings": 2048, "num_hidden_layers": 2},
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    )
    prepare_pooler(random_pooler(config), "embed")
    assert ("one text at a time, which is slower" in caplog.text) == bool(off_by)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_without_files_encoders_take_the_mean_and_decoders_the_last_token(family: str, tmp_path: Path) -> None:
    model = random_pooler(FAMILIES[family])
    tokenizer = word_tokenizer(family, model.config.vocab_size)
    expected = vectors(model, tokenizer, TEXTS, "mean" if family in ENCODERS else "lasttoken")
    with started(save(tmp_path, family, model)) as engine:
        assert cosines(pooled(engine, [TextPrompt(text) for text in TEXTS]), expected).min() >= 0.9999


def test_a_decoder_of_a_chat_model_can_embed(tmp_path: Path) -> None:
    """Its files say that it generates, so --task embed is needed."""
    model = random_model(copy.deepcopy(FAMILIES["qwen3"]))
    folder = save(tmp_path, "qwen3", model)
    with started(folder, EngineOptions(task="embed")) as engine:
        actual_vectors = pooled(engine, [TextPrompt(text) for text in TEXTS])
    base = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    expected = vectors(base, word_tokenizer("qwen3", base.config.vocab_size), TEXTS, "lasttoken")
    assert cosines(actual_vectors, expected).min() >= 0.9999


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_memory": Bytes(2**20)},
        {"exact": True},
        {"prefix_cache_dir": Path("blocks")},
        {"max_model_len": 500},
    ],
)
def test_options_that_it_cannot_obey_stop_the_start(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path, "bert", random_pooler(FAMILIES["bert"]), pooling="cls", max_tokens=40)
    with pytest.raises(StartupError, match="--" + next(iter(options)).replace("_", "-")):
        load_pooler(folder, "embed", EngineOptions(**options))
    assert load_pooler(folder, "embed", EngineOptions()).max_model_len == 40
    assert load_pooler(folder, "embed", EngineOptions(max_model_len=200)).max_model_len == 200  # it has the positions


def test_one_of_several_models_leaves_out_general_settings_for_those_that_generate(tmp_path: Path) -> None:
    folder = save(tmp_path, "bert", random_pooler(FAMILIES["bert"]), pooling="cls", max_tokens=40)
    general = {
        "quantize": "int8",
        "kv_cache_dtype": "int8",
        "kv_cache_memory": Bytes(2**20),
        "prefix_cache_dir": tmp_path / "blocks",
        "max_model_len": 500,
    }
    options = EngineOptions(**general, inherited=frozenset({*general, "exact"}))
    with started(folder, options) as engine:
        assert engine.max_model_len == 258, "as many as it has positions"
    for name in general:
        with pytest.raises(StartupError, match="--" + name.replace("_", "-")):
            started(folder, replace(options, inherited=options.inherited - {name}))
    with pytest.raises(StartupError, match="--exact does not go together with --task embed"):
        started(folder, replace(options, exact=True))


def test_several_labels_are_refused() -> None:
    with pytest.raises(StartupError, match="2 labels, not 1"):
        prepare_pooler(random_pooler(FAMILIES["bert"], "score", num_labels=2), "score")


def test_attention_that_cannot_be_packed_runs_in_transformers_code(caplog: pytest.LogCaptureFixture) -> None:
    config = Gemma2Config(**SMALL, attn_logit_softcapping=5.0, query_pre_attn_scalar=8)
    pooler = prepare_pooler(random_pooler(config), "embed")
    assert (
        "one text at a time, which is slower: its code cannot run packed (packed attention has no softcap"
        in caplog.text
    )
    expected = random_pooler(config)(input_ids=torch.tensor([[5, 9, 30]])).last_hidden_state[0, -1]
    torch.testing.assert_close(pooler.pool([7, 5, 9, 30], [0] * 4, [1, 3])[1], expected)


def test_the_encoder_of_an_encoder_decoder_embeds(tmp_path: Path) -> None:
    """As sentence-transformers serves T5."""
    config = T5Config(vocab_size=300, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, n_positions=64)
    encoder = AutoModelForTextEncoding.from_config(config).eval()
    folder = save(tmp_path, "t5", encoder, pooling="mean", max_tokens=64)
    pooler = load_pooler(folder, "embed", EngineOptions())
    expected = encoder(input_ids=torch.tensor([[5, 9, 30]])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(pooler.pool([5, 9, 30], [0] * 3, [3])[0], expected)
