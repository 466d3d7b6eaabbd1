"""Every type of encoder gives transformers' vectors and scores: packed where that computes the same, or else alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from oaiserve.plugins.pooling.model import load, packed_check
from oaiserve.plugins.pooling.model.attention import packed_attention
from oaiserve.plugins.pooling.model.files import PoolingFiles
from oaiserve.plugins.pooling.model.load import prepare_pooler
from oaiserve.plugins.pooling.model.pooler import LoadedPooler, OwnForward, PackedForward
from tests.models.encoders import OWN, PACKED, ROTARY, encoder_config
from tests.models.outliers import STATISTICS, give_outliers
from tests.models.poolers import random_pooler

TEXTS = [[(11 * place + 5 * length) % 290 + 5 for place in range(length)] for length in (7, 1, 40, 7, 200, 30, 200)]


@torch.inference_mode()
def reference(model: PreTrainedModel, task: str) -> torch.Tensor:
    """Return the mean vectors or the scores of the texts by transformers, one at a time."""
    # Long ones first: at a short text BigBird changes to full attention, and stays there.
    order = sorted(range(len(TEXTS)), key=lambda place: -len(TEXTS[place]))
    by_place = {place: model(input_ids=torch.tensor([TEXTS[place]])) for place in order}
    outputs = [by_place[place] for place in range(len(TEXTS))]
    if task == "score":
        return torch.cat([output.logits.sigmoid() for output in outputs])
    return torch.stack([output.last_hidden_state[0].mean(0) for output in outputs])


def pooled(pooler: LoadedPooler, texts: list[list[int]]) -> torch.Tensor:
    ids = [token_id for text in texts for token_id in text]
    return pooler.pool(ids, [0] * len(ids), [len(text) for text in texts])


@pytest.mark.parametrize("name", [*PACKED, *OWN])
def test_vectors_equal_those_of_transformers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    expected = reference(random_pooler(encoder_config(name)), "embed")
    pooler = prepare_pooler(random_pooler(encoder_config(name)), "embed", PoolingFiles("mean"), name=name)
    assert type(pooler.forward) is (PackedForward if name in PACKED else OwnForward)
    says = [record.message for record in caplog.records if "computes one text at a time" in record.message]
    assert [name in said for said in says] == [True] * (name in OWN)
    vectors = pooled(pooler, TEXTS)
    assert torch.cosine_similarity(vectors, expected).min() >= 0.9999
    for place in (0, 2, 4):
        assert torch.equal(pooled(pooler, [TEXTS[place]])[0], vectors[place]), "the same bytes alone and in company"


CLASSIFIED = [
    name for name in (*PACKED, *OWN) if type(encoder_config(name)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
]


@pytest.mark.parametrize("name", CLASSIFIED)
def test_scores_equal_those_of_transformers(name: str) -> None:
    config = encoder_config(name)
    expected = reference(random_pooler(config, "score"), "score")
    pooler = prepare_pooler(random_pooler(config, "score"), "score", name=name)
    torch.testing.assert_close(pooled(pooler, TEXTS), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", PACKED)
def test_real_looking_weights_stay_packed(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for statistic in STATISTICS:
            model = random_pooler(encoder_config(name)).to(dtype)
            give_outliers(model, statistic)
            before = {key: value.clone() for key, value in model.state_dict().items()}
            pooler = prepare_pooler(model, "embed", PoolingFiles("mean"), pack=False)
            assert isinstance(pooler.forward, PackedForward), statistic
            assert all(value.equal(before[key]) for key, value in model.state_dict().items()), "weights are as before"


def scaled(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return packed_attention(module, query * 1.02, *args, **kwargs)


def flipped(*args: Any, **kwargs: Any) -> Any:
    module, query, key, value, mask = args
    return packed_attention(module, query, key, value.flip(1), mask, **kwargs)


def late(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return packed_attention(module, query, key.roll(1, dims=2), *args, **kwargs)


def across_texts(*args: Any, runs: list[tuple[int, int]], **kwargs: Any) -> Any:
    return packed_attention(*args, runs=[(1, sum(number * length for number, length in runs))], **kwargs)


def causal(*args: Any, **kwargs: Any) -> Any:
    return packed_attention(*args, **kwargs | {"is_causal": True})


def narrow(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    return packed_attention(*args, sliding_window=sliding_window and sliding_window - 1, **kwargs)


MUTANTS: list[Callable[..., Any]] = [scaled, flipped, late, across_texts, causal]


# Each family with one statistic, and one family with all.
@pytest.mark.parametrize(
    ("name", "statistic"),
    dict.fromkeys([*zip(PACKED, cycle(STATISTICS), strict=False), *(("bert", statistic) for statistic in STATISTICS)]),
)
def test_each_fault_of_attention_is_found(name: str, statistic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_pooler(encoder_config(name)).to(torch.bfloat16)
    give_outliers(model, statistic)
    for mutant in [*MUTANTS, *[narrow] * (name == "modernbert")]:
        monkeypatch.setattr(packed_check, "packed_attention", mutant)
        assert isinstance(prepare_pooler(model, "embed", pack=False).forward, OwnForward), mutant.__name__


@pytest.mark.parametrize("name", sorted(PACKED.keys() - ROTARY))
def test_positions_that_begin_elsewhere_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_pooler(encoder_config(name))
    right = load._first_position
    monkeypatch.setattr(load, "_first_position", lambda layers: right(layers) + 1)
    assert isinstance(prepare_pooler(model, "embed", pack=False).forward, OwnForward)
