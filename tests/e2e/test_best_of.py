"""Tests that `best_of` returns the likeliest of the candidates that `n` returns, with a small random model."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.model.runners import eager_runner
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.routes.conftest import run_server
from tests.routes.doubles import FakeTelemetry

SAMPLED = {"prompt": [[5, 6, 7], [40]], "seed": 3, "max_tokens": 9, "stop_token_ids": list(range(12)), "logprobs": 1}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    loaded = prepare(random_model(FAMILIES["llama"]))
    engine = Engine(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=eager_runner(loaded, num_blocks=64, block_size=4),
            num_blocks=64,
            max_model_len=48,
            vocab_size=loaded.vocab_size,
        ),
        EngineOptions(block_size=4),
    )
    app = create_app(Config("random", ServerOptions()), engine, FakeTelemetry())
    with run_server(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_best_candidates_are_those_of_n_with_the_highest_mean_logprob(http: httpx.Client) -> None:
    everything = complete(http, **SAMPLED, n=6)
    best = complete(http, **SAMPLED, n=2, best_of=6)
    groups = [everything["choices"][:6], everything["choices"][6:]]
    ranked = [sorted(group, key=lambda c: -fmean(c["logprobs"]["token_logprobs"])) for group in groups]
    assert len({len(choice["logprobs"]["tokens"]) for group in ranked for choice in group}) > 2, "lengths must differ"
    expected = [choice for group in ranked for choice in group[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for choice, from_all in zip(best["choices"], expected, strict=True):
        assert choice | {"index": None} == from_all | {"index": None}
    assert best["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]


def test_without_logprobs_best_of_returns_the_same_choices(http: httpx.Client) -> None:
    with_logprobs = complete(http, **SAMPLED, best_of=4)
    without = complete(http, **SAMPLED | {"logprobs": None}, best_of=4)
    assert [choice["logprobs"] for choice in without["choices"]] == [None, None]
    assert [c["text"] for c in without["choices"]] == [c["text"] for c in with_logprobs["choices"]]
