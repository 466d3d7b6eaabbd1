"""Adapters with grammars, drafts, preemptions, the prefix cache and a KV cache in eight bits: no answer changes."""

import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import KVCacheDtype
from oaiserve.engine.drafting.drafts import MOST_STEP_TOKENS, StepTimes
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.request import Grammar, Request, SamplingParams, TokenPrompt
from oaiserve.engine.types.adapters import AdapterTable
from tests.engine.answers import collect, collect_together
from tests.engine.executors.native.small_models import config, make_model, native_decoder
from tests.engine.model.runners import make_engine
from tests.engine.model.steps import BLOCK_SIZE
from tests.models.adapters import adaptable, random_adapter
from tests.models.described import SmallModel, described

pytestmark = pytest.mark.compiler
NUM_TOKENS = 24
EOS = 2
MODEL = make_model(config("llama"))
ADAPTERS = [random_adapter(adaptable(MODEL), seed, rank=3 * seed) for seed in (1, 2)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "of three tokens": {"temperature": 0.0, "allowed_token_ids": (5, 9, 40)},  # The answer repeats itself.
    "drawn": {"temperature": 1.0, "seed": 3},
    "held to a grammar": {"temperature": 0.0, "grammar": Grammar("regex", "[A-Z]{2}-[0-9]{8}-[a-z]*")},
}


def prompt_of(kind: str) -> list[int]:
    """Return a prompt whose first block is that of all others."""
    return [*(7 * i % 97 for i in range(BLOCK_SIZE + 4)), list(KINDS).index(kind)]


REQUESTS = [
    Request(
        f"{kind}, adapter {number}",
        (TokenPrompt(prompt_of(kind)),),
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params),
        adapter=number,
    )
    for kind, params in KINDS.items()
    for number in range(1 + len(ADAPTERS))
]


def make_runner(loaded: SmallModel, num_blocks: int) -> ModelRunner:
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "num_threads": 2}
    return ModelRunner(native_decoder(loaded, has_adapters=True, **sizes), loaded.device, BLOCK_SIZE)


def with_adapters(kv_cache_dtype: KVCacheDtype, num_blocks: int, **options: Any) -> Engine:
    """Return an engine that has the adapters under their numbers."""
    loaded = described(MODEL).with_cache(kv_cache_dtype)
    runner = make_runner(loaded, num_blocks)
    table = AdapterTable(lambda number, *_: runner.add_adapter(number, ADAPTERS[number - 1]), runner.drop_adapter)
    for number in range(len(ADAPTERS)):
        table.load(str(number), Path(), 0)
    return make_engine(loaded, runner, num_blocks, eos=EOS, adapters=table, **options)


@cache
def answers_alone(kv_cache_dtype: KVCacheDtype) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each request that is answered alone, a token a step, from an empty cache."""
    token_ids: dict[tuple[str, int], list[int]] = {}
    with with_adapters(kv_cache_dtype, 64, drafts="off", prefix_cache=False) as engine:
        for request in REQUESTS:
            token_ids |= collect(engine, [request]).token_ids
    return token_ids


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_answers_with_drafts_are_those_alone(kv_cache_dtype: KVCacheDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "expected", lambda _: [1.0] * (MOST_STEP_TOKENS + 1))  # so drafts cost nothing
    with with_adapters(kv_cache_dtype, 64, drafts="lookup") as engine:
        tokens = collect(engine, REQUESTS).token_ids
        snapshot = engine.snapshot()
    assert tokens == answers_alone(kv_cache_dtype)
    assert snapshot.num_accepted_tokens > 5
    assert snapshot.num_masked_draws > 5
    assert snapshot.num_prefix_hits == BLOCK_SIZE * (len(REQUESTS) - 1 - len(ADAPTERS))  # not across adapters


def test_answers_with_preemptions_are_those_alone() -> None:
    answers = collect_together(with_adapters("auto", 8, drafts="off", tokenize_workers=0), REQUESTS)
    assert answers.token_ids == answers_alone("auto")
    assert answers.num_preemptions > 0


def test_an_adapter_is_kept_in_the_form_that_native_code_reads_alone() -> None:
    runner = make_runner(described(MODEL), 8)
    adapter = random_adapter(adaptable(MODEL), 1, rank=3)
    weights = weakref.ref(adapter)
    runner.add_adapter(1, adapter)
    del adapter
    assert weights() is None
