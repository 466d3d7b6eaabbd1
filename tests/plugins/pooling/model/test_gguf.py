"""GGUF files of embedding models and rerankers give llama.cpp's vectors and logits, pooled as their metadata name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.request import FilledPrompt, PairPrompt, TextPrompt, TokenPrompt
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model.load import load_pooler
from tests.models.encoder_files import FILES, PAIR, PAIR_IDS, PAIR_TEMPLATE, RECORDS, TEXTS, write_encoder
from tests.plugins.pooling.model.started import started
from tests.plugins.pooling.model.test_families import pooled

RECORDED: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
RERANKERS = [name for name in FILES if name.endswith("rank")]


@pytest.mark.parametrize("name", [name for name in FILES if name not in RERANKERS])
def test_vectors_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, name)
    pooler = load_pooler(path, "embed", EngineOptions())
    ids = [token_id for text in TEXTS for token_id in text]
    actual = pooler.pool(ids, [0] * len(ids), [len(text) for text in TEXTS])
    expected = torch.tensor(RECORDED[name])
    assert pooler.pooling.size == actual.shape[1] == expected.shape[1]
    assert torch.cosine_similarity(expected[:1], expected[1:]) < 0.9, "the vectors must be able to differ"
    assert torch.cosine_similarity(actual, expected).min() >= 0.9999


@pytest.mark.parametrize("name", ["bert-rank", "modern-bert-rank"])
@pytest.mark.parametrize("names_pooling", [True, False])
def test_scores_are_the_sigmoid_of_llama_cpps_logits(name: str, names_pooling: bool, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, name, names_pooling=names_pooling)
    result = load_pooler(path, "score", EngineOptions()).pool(PAIR_IDS, [0] * len(PAIR_IDS), [len(PAIR_IDS)])
    assert float(result.logit()) == pytest.approx(RECORDED[name], abs=3e-3)  # llama.cpp rounds inside its GELU


def test_a_reranker_with_a_template_gives_llama_cpps_probability(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "qwen3-rank")
    pooler = load_pooler(path, "score", EngineOptions())
    assert pooler.pooling.pair_template == PAIR_TEMPLATE
    pair = FilledPrompt(PAIR_TEMPLATE, {"query": PAIR[0], "document": PAIR[1]})
    ids = Tokenizer.from_pretrained(path).encode(pair)
    assert float(pooler.pool(ids, [0] * len(ids), [len(ids)])) == pytest.approx(RECORDED["qwen3-rank"], abs=1e-3)


def test_another_task_than_that_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be served for --task score: its metadata name another one"):
        load_pooler(write_encoder(tmp_path, "bert-cls"), "score", EngineOptions())


def test_a_file_without_pooling_of_a_decoder_can_embed(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "qwen3", pooling=0)
    assert load_pooler(path, "embed", EngineOptions()).pooling.size == 64


def test_a_reranker_that_names_no_pooling_can_embed(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "bert-rank", names_pooling=False)
    assert load_pooler(path, "embed", EngineOptions()).pooling.size == 64


def test_texts_and_pairs_are_encoded_by_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    text = TextPrompt("ab ad bc")
    ids = TokenPrompt([2, 6, 8, 33, 3])  # with [CLS] and [SEP] of the file
    with started(write_encoder(tmp_path, "bert-cls")) as engine:
        assert engine.pooling is not None
        assert engine.pooling.task == "embed"
        first, second = pooled(engine, [text, ids])
        assert first.tolist() == second.tolist()
    with started(write_encoder(tmp_path, "bert-rank")) as engine:
        (score,) = pooled(engine, [PairPrompt("ab ad bc", "ba ca")])
    pooler = load_pooler(tmp_path / "bert-rank.gguf", "score", EngineOptions())
    assert score[0] == pytest.approx(float(pooler.pool([2, 6, 8, 33, 3, 31, 57, 3], [0] * 5 + [1] * 3, [8])))
