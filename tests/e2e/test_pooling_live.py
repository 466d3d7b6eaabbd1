"""Tests servers of models that embed and score, as processes, with the official OpenAI SDK."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.e2e.conftest import API_KEY, LiveServer, serve_process
from tests.models.poolers import FAMILIES, random_pooler, save, vectors, word_tokenizer

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
