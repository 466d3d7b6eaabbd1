"""Weights and vectors of tokens are those that FlagEmbedding's code for BGE-M3 computes."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Pooled, PooledAs, Request, SamplingParams, TextPrompt
from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model.load import load_pooler
from oaiserve.plugins.pooling.model.packed_check import Unpackable
from tests.models.poolers import FAMILIES, random_pooler, save, word_tokenizer
from tests.plugins.pooling.model.started import started

FAMILY = "xlm-roberta"  # BGE-M3's
TEXTS = ["cat aa cat", "b", "ab zz aa ab aa " * 9, "cat"]
SIZE = 12  # numbers of a token's vector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(tmp_path_factory.mktemp("m3"), FAMILY, random_pooler(FAMILIES[FAMILY]), pooling="cls")
    generator = torch.Generator().manual_seed(1)
    for name, size in (("sparse_linear", 1), ("colbert_linear", SIZE)):
        tensors = {"weight": torch.randn(size, 32, generator=generator), "bias": torch.ones(size)}
        save_file({key: value.half() for key, value in tensors.items()}, path / f"{name}.safetensors")
    return path


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_pooler(FAMILIES[FAMILY])


@pytest.fixture(scope="module")
def tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerFast:
    return word_tokenizer(FAMILY, model.config.vocab_size)


def pooled(engine: Engine, texts: list[str], kind: PooledAs) -> list[np.ndarray]:
    prompts = tuple(TextPrompt(text) for text in texts)
    request = Request(kind, prompts, SamplingParams(max_tokens=0, pooled_as=kind))
    found = {event.index: np.array(event.vector) for event in engine.stream(request) if isinstance(event, Pooled)}
    return [found[index] for index in range(len(texts))]


def layer(folder: Path, name: str) -> torch.nn.Linear:
    tensors = load_file(folder / f"{name}.safetensors")
    linear = torch.nn.Linear(32, tensors["weight"].shape[0])
    linear.load_state_dict({key: value.float() for key, value in tensors.items()})
    return linear


@torch.inference_mode()
def weights_of(text: str, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[int, float]:
    """Return FlagEmbedding's `lexical_weights`."""
    inputs = tokenizer(text, return_tensors="pt")
    found = torch.relu(layer(folder, "sparse_linear")(model(**inputs).last_hidden_state))[0, :, 0]
    unused = {tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>", "<pad>", "<unk>")}
    largest: dict[int, float] = {}
    for weight, token_id in zip(found.tolist(), inputs["input_ids"][0].tolist(), strict=True):
        if token_id not in unused and weight > 0:
            largest[token_id] = max(weight, largest.get(token_id, 0))
    return largest


@torch.inference_mode()
def vectors_of(text: str, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return FlagEmbedding's `colbert_vecs`."""
    hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return torch.nn.functional.normalize(layer(folder, "colbert_linear")(hidden[1:]), dim=-1).numpy()


@pytest.mark.parametrize("has_packed_attention", [True, False])
def test_tokens_have_the_weights_and_vectors_of_the_model(
    has_packed_attention: bool,
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_packed_attention:
        monkeypatch.setattr("oaiserve.plugins.pooling.model.load._refuse_unless_packable", _refuse)
    with started(folder, device="cpu") as engine:
        assert (engine.pooling.has_token_weights, engine.pooling.token_size) == (True, SIZE)
        weights = pooled(engine, TEXTS, "token_weights")
        vectors = pooled(engine, TEXTS, "token_vectors")
        whole = pooled(engine, TEXTS, "text")
    expected = [weights_of(text, folder, model, tokenizer) for text in TEXTS]
    assert any(len(each) > 1 for each in expected), "some texts must have several weights"
    for text, found, wanted in zip(TEXTS, weights, expected, strict=True):
        pairs = found.reshape(-1, 2)
        assert pairs[:, 0].astype(int).tolist() == sorted(wanted), text
        np.testing.assert_allclose(pairs[:, 1], [wanted[token_id] for token_id in sorted(wanted)], rtol=1e-3)
    for text, found in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(found.reshape(-1, SIZE), vectors_of(text, folder, model, tokenizer), atol=1e-4)
    assert [len(each) for each in whole] == [32] * len(TEXTS)


def _refuse(*_: object) -> None:
    raise Unpackable("it is to run in transformers' code")


def test_results_are_the_same_bytes_beside_texts_of_another_kind(folder: Path) -> None:
    kinds: list[PooledAs] = ["text", "token_weights", "token_vectors", "text", "token_weights"]
    texts = [[(5 * place + length) % 290 + 5 for place in range(length)] for length in (7, 30, 1, 12, 7)]
    pooler = load_pooler(folder, "embed", EngineOptions(device="cpu"))

    def run(places: list[int]) -> list[bytes]:
        ids = [token_id for place in places for token_id in texts[place]]
        lengths = [len(texts[place]) for place in places]
        found = pooler.pool_as([kinds[place] for place in places], ids, [0] * len(ids), lengths, frozenset({6}))
        return [vector.tobytes() for vector in found]

    together = run([*range(len(texts))])
    assert together == [run([place])[0] for place in range(len(texts))]
    [lone] = pooler.pool(texts[0], [0] * 7, [7])
    assert together[0] == lone.numpy().tobytes()


def test_without_layers_a_token_has_its_hidden_state_and_no_weight(
    folder: Path,
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*_linear.safetensors"))
    torch.save(layer(folder, "sparse_linear").state_dict(), bare / "sparse_linear.pt")
    with caplog.at_level(logging.WARNING), started(bare, device="cpu") as engine:
        assert (engine.pooling.has_token_weights, engine.pooling.token_size) == (False, 32)
        [vectors] = pooled(engine, TEXTS[:1], "token_vectors")
    with torch.inference_mode():
        hidden = model(**tokenizer(TEXTS[0], return_tensors="pt")).last_hidden_state[0]
    np.testing.assert_allclose(vectors.reshape(-1, 32), hidden, atol=1e-4)
    assert "sparse_linear.safetensors" in caplog.text, "a command converts the pickle"


def test_a_layer_for_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    save_file({"weight": torch.ones(1, 16)}, other / "sparse_linear.safetensors")
    with pytest.raises(StartupError, match=r"sparse_linear.safetensors.* \[any, 32\].* weight \[1, 16\]"):
        started(other, device="cpu")
