"""A draft model changes no answer, guesses as the model draws, and computes each token of a sequence once."""

from __future__ import annotations

import pytest
import torch

from oaiserve.engine import results
from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.model.runner import Launched
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Finished, Request, SamplingParams, TokenPrompt
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Step
from tests.engine.answers import Answers
from tests.engine.drafting.test_draft_model import Busy
from tests.engine.model.engine_runs import run, some_requests
from tests.engine.model.runners import eager_runner, greedy
from tests.models.decoders import FAMILIES, random_model

BLOCK_SIZE = 4
NUM_REQUESTS = 60


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


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> Answers:
    return run(loaded, some_requests(1)[:NUM_REQUESTS], overlap=False, num_blocks=1000)


@pytest.mark.parametrize(
    ("seed", "noise", "num_blocks"),
    [(0, 0.0, 1000), (0, 0.0, 14), (0, 0.2, 14), (5, 0.0, 1000)],
    ids=["the same", "the same with preemptions", "alike with preemptions", "another"],
)
def test_answers_are_those_without_a_draft_model(
    loaded: LoadedModel, expected: Answers, seed: int, noise: float, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with penalties, bad words, grammars, log-probabilities, stops, choices and preemptions."""
    monkeypatch.setattr(results, "FEW_TOKENS", 0)
    drafts = drafts_of(made(seed, noise), num_blocks)
    monkeypatch.setattr(drafts, "_look_up", lambda *_: None)
    found = run(loaded, some_requests(1)[:NUM_REQUESTS], overlap=False, num_blocks=num_blocks, drafts=drafts)
    assert all(isinstance(event, Finished) for event in found.ended.values())
    assert (found.num_preemptions > 0) == (num_blocks == 14)
    found.check(expected)
    num_drafted, num_accepted = found.total("num_draft_tokens"), found.total("num_accepted_tokens")
    assert num_drafted == found.total("num_model_draft_tokens")
    assert num_accepted == found.total("num_accepted_model_tokens")
    assert num_drafted > 50
    if seed == 0 and not noise:
        # Of a draft that is right, only what follows a stop string or the end of a grammar counts nowhere.
        assert num_accepted > 0.9 * num_drafted
    else:
        assert num_accepted < 0.8 * num_drafted


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
