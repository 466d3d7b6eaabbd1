"""Matrices in blocks are packed together, without Python's lock."""

from pathlib import Path

import pytest
import torch

from oaiserve.checkpoints.source import find_model
from oaiserve.engine.executors.native import pack_weights
from oaiserve.engine.start.described import describe_model
from tests.engine.executors.native.small_models import BLOCK_SIZE, native_of
from tests.models.in_blocks import FAMILIES, OPTIONS, batch_of, file_of

pytestmark = pytest.mark.compiler
SIZES = {"num_blocks": 8, "block_size": BLOCK_SIZE, "num_threads": 2}


def logits_and_calls(path: Path) -> tuple[torch.Tensor, int]:
    """Return logits of the model in a file, and how many times its executor has packed blocks."""
    calls: list[None] = []
    described = describe_model(find_model(path), OPTIONS)
    executor = native_of(described, **SIZES, before_packing=lambda: calls.append(None))
    return executor.forward(batch_of(9, executor.vocab_size)).clone(), len(calls)


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_all_matrices_of_a_small_model_are_packed_in_one_call(family: str, tmp_path: Path) -> None:
    assert logits_and_calls(file_of(FAMILIES[family], tmp_path))[1] == 1


def test_a_model_that_is_packed_in_several_calls_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    expected, _ = logits_and_calls(path)
    monkeypatch.setattr(pack_weights, "_BYTES_AT_ONCE", 1)
    logits, num_calls = logits_and_calls(path)
    assert num_calls > 2
    assert torch.equal(logits, expected)
