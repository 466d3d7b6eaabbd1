"""The quality tool's reference is transformers' code in float32, and its figures are those of known distributions."""

from pathlib import Path

import pytest
import torch

from oaiserve.checkpoints.source import find_model
from oaiserve.engine.model.rehearsal import prompt
from tests.engine.executors.native.small_models import BLOCK_SIZE
from tests.models.described import model_of_files
from tests.models.in_blocks import FAMILIES, file_of, own_logits
from tools.quality.__main__ import Stored, chosen, compare, figures, table, text
from tools.quality.reference import Reference


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3"])
def test_reference_is_transformers_with_expanded_weights(family: str, tmp_path: Path) -> None:
    path = file_of(FAMILIES[family], tmp_path)
    model = model_of_files(path)
    ids = prompt(40, model.config.vocab_size, BLOCK_SIZE).chunks[0].sequence.token_ids
    expected = torch.cat([own_logits(model, count) for count in (1, 8, 40)])
    for _ in ("computed", "stored"):
        logits = Reference(find_model(path), ids, tmp_path / "stored").logits([0, 7, 39])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


class _Uniform:
    """A reference whose tokens are all equally likely, except for a nudge that makes token 0 the likeliest."""

    def logits(self, rows: list[int]) -> torch.Tensor:
        return torch.zeros(len(rows), 4).index_fill(1, torch.tensor([0]), 1e-6)


def test_divergence_and_agreement_are_means_of_each_range() -> None:
    rows = [0, 1, 2, 600]
    logits = torch.tensor([[1e-6, 0, 0, 0], [1e-6, 0, 0, 0], [0, 1.0986123, 0, 0], [0, 1.0986123, 0, 0]])
    by_range = figures(rows, compare(_Uniform(), rows, iter(logits.split(1))))
    one_third_more = 0.25 * (3 * torch.tensor(1.5).log() + torch.tensor(0.5).log())  # 1/6, 1/6, 1/6, 1/2 for 1/4 each
    assert by_range["0"] == pytest.approx([0, 1], abs=1e-6)
    assert by_range["1"] == pytest.approx([float(one_third_more) / 2, 0.5], abs=1e-5)
    assert by_range["512"] == pytest.approx([float(one_third_more), 0], abs=1e-5)
    row = "| a run | decode | 0.00000, 100.0% | 0.06541, 50.0% |  | 0.13081, 0.0% |  |"
    assert table({"a run": {"decode": by_range}}).splitlines()[-1] == row


def test_stored_answers_are_found_by_their_positions() -> None:
    rows = [3, 8, 40]
    logits = torch.tensor([[0.0, 1, 2], [3, 0, 0], [0, 0, 5]])
    stored = Stored(rows, iter(logits.split(1)))
    assert stored.logits([40, 3]).tolist() == [[0, 0, 5], [0, 1, 2]]
    same = figures(rows, compare(stored, rows, iter(logits.split(1))))
    assert same["1"] == [0.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        Stored(rows, iter(logits[:2].split(1)))


def test_positions_are_spread_over_each_range() -> None:
    assert chosen(600, 4) == [0, 1, 4, 8, 12, 16, 140, 264, 388, 512, 534, 556, 578]
    assert chosen(3, 4) == [0, 1, 2]


def test_text_is_long_enough_and_has_prose_and_code() -> None:
    sample = text(20_000)
    assert 20_000 <= len(sample) < 30_000
    assert "statement" in sample
    assert "JSONDecodeError" in sample
