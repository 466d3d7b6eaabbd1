"""A right description computes what transformers' code does; a wrong one is shown with its first wrong part."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedConfig

from oaiserve import cli
from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.dense import attention
from oaiserve.engine.decoder.description import Attention
from oaiserve.engine.decoder.families import FAMILIES as DESCRIBED
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.start.compare import difference_by_row
from oaiserve.engine.start.layer_comparison import LIMIT, compare_layers
from tests.engine.executors.native.small_models import FAMILIES, config, make_model
from tests.engine.remembered import save
from tests.models.in_blocks import MIX, TOKENIZER, TOKENS, WIDE, file_of
from tests.models.small_configs import config_of

RIGHT = "All layers compute what transformers' code does."


def with_all_bytes(asked: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config whose vocabulary has the tokens of any text."""
    asked = deepcopy(asked)
    asked.vocab_size = 256
    return asked


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make_model(with_all_bytes(FAMILIES["llama"])), tmp_path)


def printed(capsys: pytest.CaptureFixture[str], model: Path, code: int) -> list[str]:
    capsys.readouterr()
    assert cli.main(["doctor", str(model)]) == code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "deepseek_v3", "mixtral", "qwen3_5_text", "mamba2"])
def test_all_parts_of_a_right_description_are_right(name: str, tmp_path: Path) -> None:
    config = with_all_bytes(FAMILIES[name])
    save(make_model(config), tmp_path)
    result = list(compare_layers(find_model(tmp_path)))
    # The last layer is compared with the logits.
    layers = [f"layer {number}" for number in range(config.num_hidden_layers - 1)]
    assert [part.part for part in result] == ["embedding", *layers, "logits"]
    assert max(part.apart for part in result) < LIMIT / 10


def test_a_right_model_passes(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *parts, _, last = printed(capsys, llama, 0)
    assert [line[:14].strip() for line in parts] == ["embedding", "layer 0", "layer 1", "logits"]
    assert last == RIGHT


def test_a_gguf_file_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = config("llama", **WIDE | {"vocab_size": len(TOKENS)})
    assert printed(capsys, file_of(small, tmp_path, MIX, Kind.Q4_0, tokenizer=TOKENIZER), 0)[-1] == RIGHT


def _with_facts(**changes: Any) -> Callable[[Family], Family]:
    return lambda family: replace(family, facts=lambda settings: replace(family.facts(settings), **changes))


def _without_rotary_in(wrong: int) -> Callable[[Family], Family]:
    def described(reader: Any, facts: Any, settings: Any, rotary: Any, number: int) -> Attention:
        description = attention(reader, facts, settings, rotary, number)
        return replace(description, rotary=None) if number == wrong else description

    return lambda family: replace(family, attention=described)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_with_facts(embedding_scale=1.1), "embedding"),
        (_with_facts(scaling=0.26), "layer 0"),
        (_without_rotary_in(1), "layer 1"),
        (_without_rotary_in(2), "logits"),
        (_with_facts(logits_scale=1.01), "logits"),
    ],
)
def test_a_wrong_family_is_shown_with_its_first_wrong_part(
    change: Callable[[Family], Family],
    part: str,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(DESCRIBED, "llama", change(DESCRIBED["llama"]))
    assert printed(capsys, llama, 1)[-1] == (
        f"From {part} on, numbers differ from those of transformers' code by more than 0.001."
    )


def test_a_model_without_a_description_has_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(make_model(config_of("nanochat", vocab_size=256)), tmp_path)
    assert printed(capsys, tmp_path, 0) == [
        "There is nothing to compare, because transformers' code computes this model: models of type 'nanochat' have "
        "no description."
    ]


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_rows_in_pieces_differ_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    values = expected * torch.tensor([1.0, 1.1, 1.2, 1.5, 1.3])[:, None]
    at_once = difference_by_row(values, expected)
    monkeypatch.setattr("oaiserve.engine.start.compare._MOST_AT_ONCE", 8)
    assert difference_by_row(values, expected) == at_once == pytest.approx(0.5)
