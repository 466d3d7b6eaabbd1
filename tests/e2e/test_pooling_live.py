"""Tests servers of models that embed and score, as processes, with the official OpenAI SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import API_KEY, LiveServer, serve_process
from tests.models.poolers import FAMILIES, logits, random_pooler, save, vectors, word_tokenizer

TEXTS = ["aa cat", "b", "zz ab aa ad cat b", "cat"]
FLAGS = ("--dtype", "float32", "--api-key", API_KEY, "--served-model-name", "small")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("embedder")
    model = random_pooler(FAMILIES["modernbert"])
    save(folder, "modernbert", model, pooling="cls", prompts={"query": "ad b "})
    with serve_process(str(folder), folder / "log", *FLAGS) as server:
        yield server
        assert server.terminate() == 0
        assert [line for line in server.log() if line["level"] not in ("INFO", "DEBUG")] == []


def test_the_sdk_gets_the_vectors_of_transformers(embedder: LiveServer) -> None:
    model = random_pooler(FAMILIES["modernbert"])
    tokenizer = word_tokenizer("modernbert", model.config.vocab_size)
    expected = vectors(model, tokenizer, TEXTS, "cls")
    with embedder.sdk() as client:
        by_default = client.embeddings.create(model="small", input=TEXTS)
        as_floats = client.embeddings.create(model="small", input=TEXTS, encoding_format="float")
    assert [item.index for item in by_default.data] == [0, 1, 2, 3]
    found = np.array([item.embedding for item in by_default.data])
    assert (found * expected).sum(1).min() >= 0.9999
    np.testing.assert_allclose(found, [item.embedding for item in as_floats.data], atol=1e-4)
    num_tokens = sum(len(tokenizer(text).input_ids) for text in TEXTS)
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == num_tokens


def test_many_requests_at_once_get_the_vectors_of_each_alone(embedder: LiveServer) -> None:
    with embedder.http() as http:
        alone = [http.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"] for text in TEXTS]
        together = http.post("/v1/embeddings", json={"input": TEXTS * 100}).json()["data"]
    found = np.array([item["embedding"] for item in together]).reshape(100, 4, -1)
    np.testing.assert_allclose(found, np.broadcast_to(alone, found.shape), atol=1e-4)


def test_a_cross_encoder_ranks_as_transformers_does(tmp_path: Path) -> None:
    model = random_pooler(FAMILIES["xlm-roberta"], "score")
    tokenizer = word_tokenizer("xlm-roberta", model.config.vocab_size)
    expected = logits(model, tokenizer, [("aa b", text) for text in TEXTS])
    save(tmp_path, "xlm-roberta", model)
    with serve_process(str(tmp_path), tmp_path / "log", *FLAGS) as server:
        with server.http() as http:
            results = http.post("/v1/rerank", json={"query": "aa b", "documents": TEXTS}).json()["results"]
            assert http.post("/v1/embeddings", json={"input": "aa"}).status_code == 400
        assert server.terminate() == 0
    assert [item["index"] for item in results] == sorted(range(4), key=lambda index: -expected[index])
    sigmoids = 1 / (1 + np.exp(-np.array(expected)))
    np.testing.assert_allclose([item["relevance_score"] for item in results], -np.sort(-sigmoids), atol=2e-4)
