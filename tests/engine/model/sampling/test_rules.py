"""Rules of plug-ins edit the logits of each draw of their sequences."""

from asyncio import CancelledError

import pytest
import torch

from oaiserve.engine.model.sampling.logit_edits import edit_logits
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk
from oaiserve.engine.types.sampling_rule import Rule, SamplingRule
from tests.engine.model.sampling.sampling import last_chunks, sample

GREEDY = SamplingParams(temperature=0)


def sequence(*rules: Rule) -> Sequence:
    named = tuple(SamplingRule("tests", rule) for rule in rules)
    return Sequence("r", 0, [1, 2], GREEDY, max_len=10, rules=named)


def test_rules_edit_the_logits_in_order() -> None:
    def double_third(logits: torch.Tensor, answer_ids: list[int]) -> None:
        logits[3] *= 2

    def prefer_third(logits: torch.Tensor, answer_ids: list[int]) -> None:
        logits[3] += 5

    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]])
    drawn = sample(logits, [sequence(prefer_third, double_third), sequence(double_third, prefer_third)])
    assert drawn.token_ids == [3, 1]


def test_a_rule_gets_the_ids_of_the_answer_with_those_of_a_draft() -> None:
    seen: list[list[int]] = []
    drawing = sequence(lambda logits, answer_ids: seen.append(answer_ids))
    edit_logits(torch.zeros(1, 8), last_chunks([drawing]))
    drawing.token_ids += [5, 6]
    drawing.num_tokens += 2
    edit_logits(torch.zeros(1, 8), last_chunks([drawing]))
    edit_logits(torch.zeros(1, 8), [Chunk(drawing, 3, 2, draft=(7,))])
    assert seen == [[], [5, 6], [5, 6, 7]]


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, KeyboardInterrupt, CancelledError])
def test_a_rule_that_raises_fails_its_sequence_alone_and_is_named_in_the_log(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(logits: torch.Tensor, answer_ids: list[int]) -> None:
        raise error("no such token")

    drawn = sample(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), [sequence(fail), sequence()])
    assert drawn.are_finite == [False, True]
    assert caplog.messages == ["A sampling rule of plug-in 'tests' failed on request r"]


def test_a_sequence_with_a_rule_is_drawn_when_its_ids_are_known() -> None:
    with_rule = sequence(lambda logits, answer_ids: None)
    assert with_rule.has_edits
    assert with_rule.needs_ids
    assert not sequence().has_edits
