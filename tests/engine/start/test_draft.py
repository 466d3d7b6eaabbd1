"""A draft model is loaded and checked like a model, beside it, and must have its vocabulary."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start import load
from oaiserve.errors import StartupError
from tests.engine.drafting.test_draft_model import Steady
from tests.engine.model.cpu.small_models import config, make_model
from tests.engine.model.runners import greedy
from tests.engine.remembered import save, started

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("empty_cache")]
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1}
PROMPT = [*range(5, 45)]
WAYS = {
    "greedy": greedy(24, logprobs=2),
    "drawn": SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=4, n=3, ignore_eos=True, logprobs=0),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a model, of the same one with more rows than tokens, and of others."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 256, "num_hidden_layers": 2}
    return {
        "model": save(make_model(config("llama", **sizes)), root / "model"),
        "another": save(make_model(config("llama", **{**sizes, "num_hidden_layers": 1})), root / "another"),
        "wide": save(make_model(config("llama", **{**sizes, "vocab_size": 320})), root / "wide"),
        "other vocabulary": save(make_model(config("llama", **{**sizes, "vocab_size": 300})), root / "other", 300),
        "no native step": save(make_model(config("apertus", **sizes)), root / "none"),
    }


def with_drafts(model: Path, draft_model: Path | None = None, **options: Any) -> Engine:
    """Return an engine whose drafts seem to cost nothing."""
    draft = {} if draft_model is None else {"draft_model": str(draft_model)}
    engine = started(model, EngineOptions(**OPTIONS | options | draft))
    drafts = engine._loop._stepper._drafts
    if drafts.model is not None:
        drafts._times, drafts.model.times = Steady(1e15), Steady(0.0)
    return engine


def ask(engine: Engine, params: SamplingParams) -> tuple[list[list[int]], int, int]:
    """Return the answers of two requests, the second of which finds its prompt in the prefix cache."""
    before = engine.snapshot()
    found = [one.token_ids for _ in range(2) for one in engine.generate([PROMPT], params)]
    after = engine.snapshot()
    return (
        found,
        after.num_model_draft_tokens - before.num_model_draft_tokens,
        after.num_accepted_model_tokens - before.num_accepted_model_tokens,
    )


@pytest.mark.parametrize(
    ("model", "draft", "cache"),
    [
        ("model", "model", "auto"),
        ("model", "another", "auto"),
        ("model", "wide", "auto"),
        ("wide", "model", "auto"),
        ("model", "model", "int8"),
    ],
)
def test_answers_are_the_same_and_a_draft_model_that_is_the_model_is_right(
    saved: dict[str, Path], model: str, draft: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has more rows than tokens, as among the sizes of some families."""
    with with_drafts(saved[model], kv_cache_dtype=cache) as engine:
        expected = {way: ask(engine, params)[0] for way, params in WAYS.items()}
    with with_drafts(saved[model], saved[draft], kv_cache_dtype=cache) as engine:
        monkeypatch.setattr(engine._loop._stepper._drafts, "_look_up", lambda *_: None)
        for way, params in WAYS.items():
            found, num_drafted, num_accepted = ask(engine, params)
            assert found == expected[way]
            assert num_drafted > 20
            if model == draft:
                assert num_accepted == num_drafted


def test_both_start_again_without_transformers(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oaiserve")
    with with_drafts(saved["model"], saved["another"]) as engine:
        expected = ask(engine, WAYS["greedy"])
        num_blocks = engine.snapshot().blocks_total
    monkeypatch.setattr(load, "load_model", None)
    monkeypatch.setattr("oaiserve.engine.text.tokenizer._load", None)
    with with_drafts(saved["model"], saved["another"]) as engine:
        assert ask(engine, WAYS["greedy"]) == expected
        assert engine.snapshot().blocks_total == num_blocks
    assert sum("guesses tokens; its KV cache takes" in record.message for record in caplog.records) == 2


def test_its_cache_counts_in_the_memory_that_is_asked_for(saved: dict[str, Path]) -> None:
    options = OPTIONS | {"kv_blocks": None, "kv_cache_memory": 2**20}
    alone = with_drafts(saved["model"], **options).snapshot().blocks_total
    both = with_drafts(saved["model"], saved["another"], **options).snapshot().blocks_total
    assert both == alone * 2 // 3, "the draft model has one layer and the model has two"


def test_another_vocabulary_is_refused(saved: dict[str, Path]) -> None:
    with pytest.raises(StartupError) as found:
        with_drafts(saved["model"], saved["other vocabulary"])
    assert str(found.value) == (
        f"--draft-model {saved['other vocabulary']} has another vocabulary than the model, 300 tokens and 256: id 256 "
        "is 'aa' of the draft model and no token of the model. Both must have the same."
    )


@pytest.mark.parametrize(("model", "draft"), [("no native step", "model"), ("model", "no native step")])
def test_both_need_a_native_step(saved: dict[str, Path], model: str, draft: str) -> None:
    with pytest.raises(StartupError, match=r"--draft-model .*needs the native step, which cannot be used: "):
        with_drafts(saved[model], saved[draft])


def test_its_files_are_checked_before_they_are_loaded(saved: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(saved["another"], cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(StartupError, match=r"cut"):
        with_drafts(saved["model"], cut)
    with pytest.raises(StartupError, match=r"nowhere"):
        with_drafts(saved["model"], tmp_path / "nowhere")


def test_a_limit_of_the_model_is_none_of_the_draft_model(saved: dict[str, Path]) -> None:
    with with_drafts(saved["model"], saved["another"], max_model_len=64) as engine:
        assert engine.max_model_len == 64
        drafts = engine._loop._stepper._drafts
        assert drafts.model.max_len == 128


def test_a_sequence_that_is_longer_than_the_draft_model_allows_goes_on_without_it(saved: dict[str, Path]) -> None:
    with with_drafts(saved["model"], saved["model"]) as engine:
        engine._loop._stepper._drafts.model.max_len = len(PROMPT) + 10
        found, num_drafted, _ = ask(engine, WAYS["greedy"])
    assert 0 < num_drafted <= 2 * 10
    assert [len(tokens) for tokens in found] == [24, 24]
