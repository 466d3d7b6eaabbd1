"""Drafts with a model: the tokens that count are those of one token a step."""

from typing import Any

import pytest
import torch

from oaiserve.engine.executors.runner import BAD_LOGITS, ModelRunner
from oaiserve.engine.requests import results
from oaiserve.engine.sequences.masks import fill_masks
from oaiserve.engine.sequences.noise import draw_key
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Draw, Step
from tests.engine.answers import Answers
from tests.engine.device import FutureDrafts
from tests.engine.grammars.plain import OneOf, constraint
from tests.engine.model.engine_runs import run, some_requests
from tests.engine.model.runners import eager_runner, reference_of
from tests.engine.model.steps import sequence_of
from tests.models.described import SmallModel

PROMPT = [5, 9, 3, 17, 60]


@pytest.fixture(scope="module")
def expected(loaded: SmallModel) -> Answers:
    return run(loaded, eager_runner(loaded, num_blocks=1000, block_size=4), some_requests(1), 1000)


class Known(FutureDrafts):
    """Writes drafts of the known answer, of which tokens are wrong now and then."""

    def __init__(self, expected: Answers, share_right: float) -> None:
        super().__init__(3, share_right)
        self._expected = expected.token_ids

    def _wrong(self) -> int:
        return self._random.randrange(97)

    def _next(self, sequence: Sequence) -> int | None:
        behind = self._expected.get((sequence.request_id, sequence.index), [])[sequence.num_generated :]
        return next(iter(behind[len(sequence.draft) :]), None)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("num_blocks", [1000, 14], ids=["much memory", "little memory"])
def test_answers_are_those_without_drafts(
    loaded: SmallModel, expected: Answers, num_blocks: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with penalties, bad words, grammars, log-probabilities, stops, choices and preemptions."""
    monkeypatch.setattr(results, "FEW_TOKENS", 100 * overlap)
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=4)
    drafts = Known(expected, share_right=0.85)
    runner.is_asynchronous = overlap  # steps overlap as on a GPU
    actual = run(loaded, runner, some_requests(1), num_blocks, drafts=drafts)
    actual.check(expected)
    assert 5 < actual.total("num_accepted_tokens") <= drafts.num_right


# -- one step ---------------------------------------------------------------------------------------------------------


def drawn(key: int = 0, *, first_block: int = 0, **params: Any) -> Sequence:
    return sequence_of(PROMPT, range(first_block, first_block + 3), draw_key=draw_key(key, 0), **params)


def drafted(sequence: Sequence, draft: list[int], draw: Draw = Draw.AT_LAUNCH) -> Chunk:
    num_tokens = len(sequence.token_ids) + len(draft)
    return Chunk(sequence, 0, num_tokens, 1 + len(draft), tuple(draft), draw)


def one_by_one(runner: ModelRunner, sequence: Sequence, number: int) -> ChunkResult:
    """Return the draws of `number` steps that compute one token each."""
    whole = ChunkResult()
    for _ in range(number):
        (result,) = runner.collect(runner.launch(Step([Chunk(sequence, 0, len(sequence.token_ids))]))).chunks
        sequence.token_ids += result.token_ids
        whole.token_ids += result.token_ids
        whole.logprobs = [*(whole.logprobs or []), *(result.logprobs or [])]
    return whole


EDITS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "logprobs": 1},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "bias": {"temperature": 0.0, "logit_bias": {7: 4.0, 60: -5.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 3},
}


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_a_step_draws_as_many_tokens_as_are_right_and_one_more(loaded: SmallModel, kind: str, num_right: int) -> None:
    runner = eager_runner(loaded, num_blocks=8, block_size=4)
    edits = EDITS[kind]
    stops = frozenset(range(0, 97, 2)) if "min_tokens" in edits else frozenset()

    def sequence() -> Sequence:
        return drawn(8, stop_ids=stops, **edits)

    whole = one_by_one(runner, sequence(), 5)
    draft = [*whole.token_ids[:num_right], *((token_id + 1) % 97 for token_id in whole.token_ids[num_right:4])]
    (outcome,) = runner.collect(runner.launch(Step([drafted(sequence(), draft)]))).chunks
    assert outcome.token_ids == whole.token_ids[: num_right + 1]
    assert [row.token_id for row in outcome.logprobs or []] == (outcome.token_ids if "logprobs" in edits else [])
    for row, other in zip(outcome.logprobs or [], whole.logprobs or [], strict=False):
        assert (row.logprob, row.top_ids) == (pytest.approx(other.logprob, abs=1e-4), other.top_ids)


def test_a_bad_word_that_ends_behind_a_draft_is_banned(loaded: SmallModel) -> None:
    runner = eager_runner(loaded, num_blocks=8, block_size=4)
    free = one_by_one(runner, drawn(temperature=0.0), 3)
    held = drawn(temperature=0.0, bad_words=[free.token_ids[:3]])
    launched = runner.launch(Step([drafted(held, free.token_ids[:2])]))
    runner.draw(launched)
    (outcome,) = runner.collect(launched).chunks
    assert outcome.token_ids[:2] == free.token_ids[:2]
    assert len(outcome.token_ids) == 3
    assert outcome.token_ids[2] != free.token_ids[2]


def test_each_draw_of_a_draft_has_its_own_mask(loaded: SmallModel) -> None:
    runner = eager_runner(loaded, num_blocks=16, block_size=4)
    alone = drawn(temperature=0.0)
    answers = OneOf([11, 13, 14], [12, 13, 14], [11, 13, 15])
    held = drawn(first_block=4, temperature=0.0, constraint=constraint(answers))
    step = Step([drafted(alone, [96]), drafted(held, [11, 13], Draw.LATE)])
    masks, failed = fill_masks(step.chunks[1:], 97)
    assert not failed
    launched = runner.launch(step)
    runner.draw(launched, masks)
    first, second = runner.collect(launched).chunks
    assert first.token_ids == one_by_one(runner, drawn(temperature=0.0), 1).token_ids
    assert second.token_ids[0] in (11, 12)
    assert second.token_ids[1:] in ([], [13, 14], [13, 15])


def test_logits_that_are_not_finite_behind_a_draft_end_the_result_but_not_the_sequence(loaded: SmallModel) -> None:
    executor = reference_of(loaded, num_blocks=8, block_size=4)
    forward = executor.forward
    runner = eager_runner(loaded, num_blocks=8, block_size=4, executor=executor)
    (first,) = one_by_one(runner, drawn(temperature=0.0), 1).token_ids
    for bad_row, tokens, error in ((0, [], BAD_LOGITS), (1, [first], None)):

        def broken(batch: Any, bad_row: int = bad_row) -> torch.Tensor:
            logits = forward(batch)
            logits[bad_row] = torch.nan
            return logits

        executor.forward = broken
        (outcome,) = runner.collect(runner.launch(Step([drafted(drawn(temperature=0.0), [first, 1])]))).chunks
        assert (outcome.token_ids, outcome.error) == (tokens, error)
