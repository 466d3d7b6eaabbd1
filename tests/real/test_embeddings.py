"""Real embedding models: their vectors are those of transformers, pooled as sentence-transformers defines it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Pooled, Request, SamplingParams, TextPrompt
from tests.engine.doubles import SimulatedEngine

pooling = pytest.importorskip("oaiserve.plugins.pooling")
pytestmark = pytest.mark.real

TEXTS = [
    "A cat sleeps on the warm stones.",
    "Größe, naïveté, 東京 and 🙂",
    "def add(a, b):\n    return a + b",
    "x",
    "A cat sleeps on the warm stones.",
    "The committee will meet on Thursday to discuss the budget, the new building, and who will pay for both. " * 6,
]


def vectors(engine: Engine, texts: list[str]) -> np.ndarray:
    request = Request("r", tuple(map(TextPrompt, texts)), SamplingParams(max_tokens=0))
    by_index = {event.index: np.array(event.vector) for event in engine.stream(request) if isinstance(event, Pooled)}
    return np.stack([by_index[index] for index in range(len(texts))])


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)


@torch.inference_mode()
def by_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    """Return the mean of each text's hidden states, in float32 and with padding, as sentence-transformers has it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]
    return ((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)).numpy()


@pytest.mark.parametrize("name", ["minilm", "mpnet"])
def test_vectors_of_a_folder_equal_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    """MPNet's attention cannot be packed; its folder has a desktop.ini, too."""
    folder = request.getfixturevalue(name)
    with SimulatedEngine.from_pretrained(folder, ways=pooling.plugin.inner.starts) as engine:
        actual_vectors = vectors(engine, TEXTS)
        alone = vectors(engine, TEXTS[:1])
    assert cosines(actual_vectors, by_transformers(folder, TEXTS)).min() >= 0.9999
    assert np.array_equal(alone[0], actual_vectors[0])
    assert np.array_equal(actual_vectors[4], actual_vectors[0])


# The vectors of a Q8_0 file differ by the rounding of its weights.
@pytest.mark.parametrize(("kind", "least"), [("f32", 0.9999), ("f16", 0.9999), ("q8_0", 0.999)])
def test_vectors_of_a_gguf_file_equal_those_of_its_folder(
    kind: str, least: float, minilm: Path, llama_cpp: Path, tmp_path: Path
) -> None:
    path = tmp_path / "minilm.gguf"
    converter = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(minilm)]
    subprocess.run([*converter, "--outtype", kind, "--outfile", str(path)], check=True, capture_output=True)
    with SimulatedEngine.from_pretrained(path, ways=pooling.plugin.inner.starts) as engine:
        actual_vectors = vectors(engine, TEXTS)
    assert cosines(actual_vectors, by_transformers(minilm, TEXTS)).min() >= least
