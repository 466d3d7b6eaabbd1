"""Engines with draft models that seem to cost nothing, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import SamplingParams
from tests.engine.drafting.test_draft_model import Steady
from tests.engine.model.runners import greedy
from tests.engine.remembered import started

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1}
PROMPT = [*range(5, 45)]
WAYS = {
    "greedy": greedy(24, logprobs=2),
    "drawn": SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=4, n=3, ignore_eos=True, logprobs=0),
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
