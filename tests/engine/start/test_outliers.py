"""Models with the statistics of trained ones are not refused for rounding, and mistakes are found however small."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.families import FAMILIES, encoders
from oaiserve.engine.start.prepare import prepare
from oaiserve.errors import StartupError
from tests.engine.model.cpu.small_models import make_model
from tests.models.outliers import STATISTICS, give_outliers
from tests.models.small_configs import config_of

Attend = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]
Mutant = Callable[[Attend, Tensor, Tensor, Tensor, Scoring], Tensor]
ENCODERS = [family.type for family in encoders.FAMILIES]
# Mamba 2 has no attention, and that of Doge masks keys by their content, which is refused.
PREPARED = {"llama", "gpt2", "mistral", "qwen2", "qwen3", "starcoder2", *FAMILIES}.difference(ENCODERS)
ATTENDING = sorted(PREPARED - {"mamba2", "doge"})


def _scaled(factor: float, attend: Attend, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return attend(q, k, v, scoring._replace(scaling=scoring.scaling * factor))


def _window(change: int, attend: Attend, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    window = scoring.sliding_window
    return attend(q, k, v, scoring._replace(sliding_window=None if window is None else window + change))


def _late_keys(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return attend(q, torch.cat([k[:1], k[:-1]]), v, scoring)


def _early_queries(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return attend(torch.cat([q[1:], q[-1:]]), k, v, scoring)


def _shifted_values(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return attend(q, k, v.roll(1, 0), scoring)


def _flipped_heads(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return attend(q.flip(1), k, v, scoring).flip(1)


MUTANTS: dict[str, Mutant] = {
    "scale * 1.02": partial(_scaled, 1.02),
    "window + 1": partial(_window, 1),
    "window - 1": partial(_window, -1),
    "keys late by one": _late_keys,
    "queries early by one": _early_queries,
    "values shifted": _shifted_values,
    "heads flipped": _flipped_heads,
}


class Watched(ReferenceAttention):
    """Attention that a mutant may change, and that remembers whether it could have changed anything."""

    mutant: Mutant | None = None
    has_window = False
    has_several_kv_heads = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, scoring: Scoring) -> Tensor:
        Watched.has_window |= scoring.sliding_window is not None
        Watched.has_several_kv_heads |= key.shape[1] > 1
        attend = lambda q, k, v, scoring: super(Watched, self).__call__(q, k, v, cache, scoring)  # noqa: E731
        mutant = Watched.mutant
        return attend(query, key, value, scoring) if mutant is None else mutant(attend, query, key, value, scoring)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.engine.start.prepare.ReferenceAttention", Watched)
    monkeypatch.setattr(Watched, "has_window", False)
    monkeypatch.setattr(Watched, "has_several_kv_heads", False)


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("family", ATTENDING)
def test_no_family_is_refused_for_rounding(family: str, kind: str) -> None:
    prepare(give_outliers(make_model(config_of(family), dtype=torch.bfloat16), kind))


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("family", ATTENDING)
def test_every_mutant_of_attention_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = give_outliers(make_model(config_of(family), dtype=torch.bfloat16), "large biases")
    prepare(copy.deepcopy(model))
    missed = []
    for name, mutant in MUTANTS.items():
        if ("window" in name and not Watched.has_window) or ("heads" in name and not Watched.has_several_kv_heads):
            continue
        monkeypatch.setattr(Watched, "mutant", staticmethod(mutant))
        try:
            prepare(copy.deepcopy(model))
        except StartupError:
            continue
        missed.append(name)
    assert not missed
