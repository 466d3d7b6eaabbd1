"""A draft model changes no answer, guesses as the model draws, and computes each token of a sequence once."""

from __future__ import annotations

import pytest
import torch

from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.model.runner import Launched
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Request, SamplingParams, TokenPrompt
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Step
from tests.engine.drafting.test_draft_model import Busy
from tests.engine.model.engine_runs import run
from tests.engine.model.runners import eager_runner, greedy
from tests.models.decoders import FAMILIES, random_model

BLOCK_SIZE = 4


def made(seed: int = 0, noise: float = 0.0) -> LoadedModel:
    """Return a model with random weights, and so much noise in them."""
    model = random_model(FAMILIES["llama"], seed=seed)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter) if noise else 0
    return prepare(model)


def drafts_of(loaded: LoadedModel, num_blocks: int, *, max_len: int = 1000) -> Busy:
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    launch = runner.launch

    def launch_in_order(step: Step) -> Launched:
        assert [chunk.num_tokens > 1 for chunk in step.chunks] == sorted(chunk.num_tokens > 1 for chunk in step.chunks)
        return launch(step)

    runner.launch = launch_in_order
    return Busy(DraftModel(runner, block_size=BLOCK_SIZE, max_len=max_len, vocab_size=97))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return made()


PROMPT = [*range(3, 50)]
LONG = greedy(24)


def test_the_look_up_and_a_draft_model_go_together(loaded: LoadedModel) -> None:
    """Ids that the request allows repeat themselves. A guess is taken from where it came true more often."""
    params = SamplingParams(max_tokens=30, n=2, seed=5, temperature=1.0, ignore_eos=True, allowed_token_ids=(5, 9))
    requests = [Request(f"r{i}", (TokenPrompt([5, 9, 9, i]),), params) for i in range(3)]
    expected = run(loaded, requests, overlap=False, num_blocks=1000)
    found = run(loaded, requests, overlap=False, num_blocks=1000, drafts=drafts_of(made(noise=0.5), 1000))
    found.check(expected)
    assert 0 < found.total("num_model_draft_tokens") < found.total("num_draft_tokens")


def test_a_sequence_that_is_longer_than_the_draft_model_allows_goes_on_without_it(loaded: LoadedModel) -> None:
    drafts = drafts_of(loaded, 100, max_len=30)
    found = run(loaded, [Request("r", (TokenPrompt(PROMPT[:20]),), LONG)], overlap=False, num_blocks=100, drafts=drafts)
    assert 0 < found.ended["r"].account.num_draft_tokens <= 10
    assert len(found.token_ids["r", 0]) == 24
