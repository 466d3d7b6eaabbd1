"""Answers are the same if a step is launched before the results of the one before are on the host.

The model is small and random, and drawn ids are passed from step to step on the device. On a CPU a launch computes at
once, so these tests are about which step takes which id, and about ids that are drawn after the end of an answer.
"""

from __future__ import annotations

import pytest

from oaiserve.engine import results
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Finished, Request
from oaiserve.facts.record import EventKind
from tests.engine.answers import Answers
from tests.engine.model.engine_runs import run, some_requests


@pytest.mark.parametrize("num_blocks", [1000, 14], ids=["much memory", "little memory"])
def test_answers_are_the_same_with_overlap(
    loaded: LoadedModel, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FEW_TOKENS", 100)
    requests = some_requests(1)
    expected = run(loaded, requests, overlap=False, num_blocks=1000)
    found = run(loaded, requests, overlap=True, num_blocks=num_blocks)
    assert (expected.num_unknown, found.num_unknown > 100) == (0, True)
    assert (found.num_preemptions > 20) == (num_blocks == 14)
    assert all(isinstance(event, Finished) for event in found.ended.values())
    assert {answer.finish_reason for answer in found.choices.values()} == {"stop", "length"}
    assert {type(answer.stop_reason) for answer in found.choices.values()} == {type(None), str, int}
    found.check(expected)
    assert min(one.total("num_forced_tokens") for one in (expected, found)) > 5
    for asked in requests:
        check_account(asked, found)


def check_account(asked: Request, found: Answers) -> None:
    """Assert that the stamps and the account of a request agree with what was sent."""
    ended = found.ended[asked.request_id]
    account, times = ended.account, ended.times
    num_tokens = ended.usage.completion_tokens
    assert times.tokenized <= times.scheduled <= times.first_token <= times.last_token
    assert sum(account.waits_ns.values()) == times.scheduled - times.tokenized
    if asked.params.max_tokens:
        assert len(account.inter_token_ns) == num_tokens - asked.params.n
    kinds = [event.kind for event in account.events]
    assert kinds.count(EventKind.FINISHED) == kinds.count(EventKind.FIRST_TOKEN) == asked.params.n
    num_preempted, num_resumed = kinds.count(EventKind.PREEMPTED), kinds.count(EventKind.RESUMED)
    assert num_preempted == account.num_preemptions
    # A choice that is preempted may end with the token that the step in flight draws for it.
    assert num_resumed <= num_preempted <= num_resumed + asked.params.n
    assert account.num_steps > 0
    assert 0 < account.model_ns <= times.last_token - times.scheduled
