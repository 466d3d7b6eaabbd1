"""The results of steps with a small random model: tokens, log-probabilities, bad words, errors, draws that wait."""

import copy
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.runner import BAD_LOGITS, NO_MEMORY, Launched, ModelRunner
from oaiserve.engine.model.sampling.sampled_ids import SampledIds
from oaiserve.engine.request import Grammar, SamplingParams
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.sequences.noise import noise_seed
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Draw, Logprobs, Step
from oaiserve.engine.types.sampling_rule import SamplingRule
from oaiserve.errors import InvalidRequest
from tests.engine.grammars.plain import OneOf, constraint
from tests.engine.model.runners import IN_SMALL_BLOCKS, eager_runner, make_engine, reference_of
from tests.engine.model.sampling import plain_sampling
from tests.engine.model.sampling.sampling import masks_of
from tests.engine.model.steps import sequence_of
from tests.models.decoders import FAMILIES, random_model
from tests.models.described import SmallModel

PROMPTS = [[5, 9, 3, 17, 60], [90, 4, 4], [7] * 6, [11, 40, 12]]


@pytest.fixture(scope="module")
def engine(loaded: SmallModel) -> Iterator[Engine]:
    runner = eager_runner(loaded, num_blocks=64, block_size=4)
    with make_engine(loaded, runner, eos=40, **IN_SMALL_BLOCKS) as engine:  # the token "I", which is no text therefore
        yield engine


def step_of(*params: dict[str, Any]) -> Step:
    """Return a step with all of `PROMPTS`."""
    step = Step()
    for i, prompt in enumerate(PROMPTS):
        wants = params[i].get("prompt_logprobs") is not None
        sequence = sequence_of(prompt, [2 * i, 2 * i + 1], name=str(i), wants_prompt_logprobs=wants, **params[i])
        step.chunks.append(Chunk(sequence, 0, len(prompt)))
    return step


def test_logprobs_of_prompts_and_tokens_are_those_of_the_model(loaded: SmallModel) -> None:
    model = random_model(copy.deepcopy(FAMILIES["llama"]))  # a model changes its config
    numbers = [(2, None), (None, 3), (0, 0), (None, None)]
    params = [{"temperature": 0.0, "logprobs": a, "prompt_logprobs": b} for a, b in numbers]
    runner = eager_runner(loaded, num_blocks=8, block_size=4)
    results = runner.collect(runner.launch(step_of(*params))).chunks
    for prompt, (num_top, num_prompt_top), result in zip(PROMPTS, numbers, results, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        (token_id,) = result.token_ids
        assert token_id == expected[-1].argmax()
        assert (result.logprobs is None, result.prompt_logprobs is None) == (num_top is None, num_prompt_top is None)
        if result.logprobs is not None:
            (logprobs,) = result.logprobs
            check(logprobs, token_id, num_top, expected[-1])
        rows = result.prompt_logprobs or []
        for each, token_id, of_position in zip(rows, prompt[1:], expected, strict=False):
            check(each, token_id, num_prompt_top, of_position)
            assert each.rank == (of_position > of_position[token_id]).sum() + 1
        assert len(rows) == (0 if num_prompt_top is None else len(prompt) - 1)


def check(found: Logprobs, token_id: int, num_top: int, expected: torch.Tensor) -> None:
    assert (found.token_id, found.logprob) == (token_id, pytest.approx(expected[token_id].item(), abs=1e-4))
    assert found.top_ids == expected.topk(num_top).indices.tolist()
    assert found.top_logprobs == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-4)


def test_a_sequence_without_a_token_has_the_reason_as_its_error(loaded: SmallModel) -> None:
    step = step_of({"logprobs": 1}, {"logprobs": 1}, {}, {})
    step.chunks[2] = Chunk(sequence_of([7], [4], allowed_token_ids=(5,), bad_words=[[5]]), 0, 1)
    logits = torch.zeros(4, 97)
    logits[1] = math.nan
    executor = reference_of(loaded, num_blocks=8, block_size=4)
    executor.forward = Mock(return_value=logits)
    runner = eager_runner(loaded, num_blocks=8, block_size=4, executor=executor)
    results = runner.collect(runner.launch(step)).chunks
    assert [result.error for result in results] == [None, BAD_LOGITS, BAD_LOGITS, None]
    assert [len(result.token_ids) for result in results] == [1, 0, 0, 1]


def test_a_sequence_whose_rule_raises_has_the_name_of_the_plugin_in_its_error(loaded: SmallModel) -> None:
    def fail_at_second(logits: torch.Tensor, answer_ids: list[int]) -> None:
        if len(answer_ids) == 1:
            raise SystemExit("a rule")

    ruled = sequence_of([5, 9, 3], [0, 1], temperature=0, rules=(SamplingRule("evil", fail_at_second),))
    executor = reference_of(loaded, num_blocks=8, block_size=4)
    logits = torch.zeros(1, 97)
    executor.forward = Mock(side_effect=lambda batch: logits.clone())
    runner = eager_runner(loaded, num_blocks=8, block_size=4, executor=executor)

    def next_error() -> str | None:
        start = ruled.num_tokens - 1
        (result,) = runner.collect(runner.launch(Step([Chunk(ruled, start, 1)]))).chunks
        ruled.token_ids.append(0)
        ruled.num_tokens += 1
        return result.error

    assert next_error() is None
    named = "A sampling rule of the plug-in 'evil' failed on this request. The server's log says why."
    assert next_error() == named
    logits.fill_(math.nan)  # This time it isn't the rule's fault.
    assert next_error() == BAD_LOGITS


# -- draws that wait


class CountingRows:
    """Samples as plain torch does, and records how many rows each call has."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
        self.rows.append(len(rows))
        return plain_sampling.sample_ids(logits, rows)


# A penalty and a bad word wait for the ids before.
IN_TWO_STEPS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 5.0},
    {"seed": 3, "logprobs": 1},
    {"temperature": 0.0, "bad_words": [[7, 9]]},
]


def decode_two_steps(loaded: SmallModel, *, overlap: bool, count: CountingRows) -> list[list[ChunkResult]]:
    """Return the results of a prefill and of the next decode, which with overlap is launched before they are known."""
    runner = eager_runner(loaded, num_blocks=8, block_size=4, sample_ids=count)
    runner.is_asynchronous = overlap
    sequences = [
        sequence_of(prompt, [2 * i, 2 * i + 1], name=str(i), draw_key=i, **options)
        for i, (prompt, options) in enumerate(zip(PROMPTS, IN_TWO_STEPS, strict=True))
    ]
    first = runner.launch(Step([Chunk(s, 0, s.prompt_len) for s in sequences]))
    runner.draw(first)
    results = [] if overlap else [collect_into(sequences, runner, first)]
    draws = [Draw.LATE if overlap and s.needs_ids else Draw.AT_LAUNCH for s in sequences]
    chunks = [Chunk(s, s.prompt_len, 1, draw=draw) for s, draw in zip(sequences, draws, strict=True)]
    second = runner.launch(Step(chunks))
    if overlap:
        results.append(collect_into(sequences, runner, first))
    runner.draw(second)
    return [*results, collect_into(sequences, runner, second)]


def collect_into(sequences: list[Sequence], runner: ModelRunner, launched: Launched) -> list[ChunkResult]:
    results = runner.collect(launched).chunks
    for sequence, result in zip(sequences, results, strict=True):
        sequence.token_ids += result.token_ids
        sequence.num_tokens = len(sequence.token_ids)
    return results


def test_only_rows_that_need_the_ids_before_wait_for_them(loaded: SmallModel) -> None:
    in_turn = CountingRows()
    waiting = CountingRows()
    expected = decode_two_steps(loaded, overlap=False, count=in_turn)
    assert in_turn.rows == [4, 4], "all ids are known"
    assert decode_two_steps(loaded, overlap=True, count=waiting) == expected
    assert waiting.rows == [4, 2, 2], "two rows are drawn with the launch, two after the commit"


def test_a_waiting_row_whose_sequence_has_ended_is_not_drawn(loaded: SmallModel) -> None:
    count = CountingRows()
    runner = eager_runner(loaded, num_blocks=8, block_size=4, sample_ids=count)
    ended, alive = (sequence_of([5, 9, 3], [i], temperature=0.0, repetition_penalty=5.0) for i in range(2))
    first = runner.launch(Step([Chunk(ended, 0, 3), Chunk(alive, 0, 3)]))
    runner.draw(first)
    step = Step([Chunk(one, 3, 1, draw=Draw.LATE) for one in (ended, alive)])
    second = runner.launch(step)
    _, result = runner.collect(first).chunks
    alive.token_ids += result.token_ids  # the other sequence ends, for example because of unusable logits
    step.chunks[0] = Chunk(ended, 3, 1, draw=Draw.VOID)
    runner.draw(second)
    dropped, drawn = runner.collect(second).chunks
    assert (dropped.token_ids, dropped.error, len(drawn.token_ids)) == ([], None, 1)
    assert count.rows == [2, 1]


def test_a_waiting_draw_without_memory_ends_its_sequence_only(loaded: SmallModel) -> None:
    def sample_ids(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
        if any(row.seed == noise_seed(0, 4) for row in rows):
            raise torch.OutOfMemoryError("1 GiB")
        return plain_sampling.sample_ids(logits, rows)

    runner = eager_runner(loaded, num_blocks=8, block_size=4, sample_ids=sample_ids)
    sequences = [sequence_of([5, 9, 3], [i], repetition_penalty=5.0, draw_key=i) for i in range(3)]
    first = runner.launch(Step([Chunk(sequence, 0, 3) for sequence in sequences]))
    runner.draw(first)
    second = runner.launch(Step([Chunk(sequence, 3, 1, draw=Draw.LATE) for sequence in sequences]))
    collect_into(sequences, runner, first)
    runner.draw(second)
    results = runner.collect(second).chunks
    assert [result.error for result in results] == [NO_MEMORY, None, None]
    assert [len(result.token_ids) for result in results] == [0, 1, 1]


# -- draws under a grammar


def prompts_under_grammars(*first_answers: list[int]) -> tuple[Step, list[Sequence]]:
    """Return a step with `PROMPTS`, the first two of which have a grammar, and all sequences."""
    grammars = [{"constraint": constraint(OneOf(*answers))} for answers in (first_answers, [[20]])]
    step = step_of(*[{"temperature": 0.0, "logprobs": 1, **more} for more in [*grammars, {}, {}]])
    for index in range(2):
        step.chunks[index] = Chunk(*step.chunks[index][:3], draw=Draw.LATE)
    return step, [chunk.sequence for chunk in step.chunks]


@pytest.mark.parametrize(("overlap", "rows"), [(False, [4]), (True, [2, 2])])
def test_rows_with_a_mask_draw_from_it_and_the_others_as_ever(
    loaded: SmallModel, overlap: bool, rows: list[int]
) -> None:
    """If the device computes while the host does, the others draw at once."""
    count = CountingRows()
    runner = eager_runner(loaded, num_blocks=8, block_size=4, sample_ids=count)
    runner.is_asynchronous = overlap
    plain = step_of(*[{"temperature": 0.0, "logprobs": 1}] * 4)
    expected = runner.collect(runner.launch(plain)).chunks
    count.rows.clear()
    step, sequences = prompts_under_grammars([11], [14])
    launched = runner.launch(step)
    runner.draw(launched, masks_of(sequences, loaded.vocab_size))
    assert count.rows == rows
    results = runner.collect(launched).chunks
    assert results[0].token_ids in ([11], [14])
    assert results[1].token_ids == [20]
    assert results[2:] == expected[2:]
    for result, unmasked in zip(results, expected, strict=True):
        assert result.logprobs[0].top_logprobs == pytest.approx(unmasked.logprobs[0].top_logprobs)
    assert results[1].logprobs[0].logprob < results[1].logprobs[0].top_logprobs[0]


def test_a_row_whose_token_a_grammar_has_forced_meanwhile_is_not_drawn(loaded: SmallModel) -> None:
    count = CountingRows()
    runner = eager_runner(loaded, num_blocks=8, block_size=4, sample_ids=count)
    runner.is_asynchronous = True
    step, sequences = prompts_under_grammars([11], [14])
    launched = runner.launch(step)
    step.chunks[0] = Chunk(*step.chunks[0][:3], draw=Draw.SUPERSEDED)
    runner.draw(launched, masks_of(sequences[1:], loaded.vocab_size))
    results = runner.collect(launched).chunks
    assert [len(result.token_ids) for result in results] == [0, 1, 1, 1]
    assert results[0].error is None
    assert count.rows == [2, 1]


def test_a_mask_without_a_token_ends_its_sequence_only(loaded: SmallModel) -> None:
    step, sequences = prompts_under_grammars()
    runner = eager_runner(loaded, num_blocks=8, block_size=4)
    launched = runner.launch(step)
    runner.draw(launched, masks_of(sequences, loaded.vocab_size))
    results = runner.collect(launched).chunks
    assert [result.error for result in results] == [BAD_LOGITS, None, None, None]


def test_a_mask_and_other_parameters_that_leave_no_token_end_the_request_only(engine: Engine) -> None:
    free, wrong = (
        SamplingParams(max_tokens=5, grammar=Grammar("regex", "[a-c]+"), **others)
        for others in ({}, {"allowed_token_ids": (5, 6)})
    )
    assert engine.generate([[5, 9]], free)
    with pytest.raises(InvalidRequest, match="'response_format', 'allowed_token_ids'") as error:
        engine.generate([[5, 9]], wrong)
    assert error.value.param == "response_format"
    assert engine.failure is None


# -- bad_words, with one token for each byte


def test_bad_words_that_the_model_cannot_generate_change_nothing(engine: Engine) -> None:
    free, same = (
        engine.generate([[40, 50, 60]], SamplingParams(max_tokens=9, temperature=0.0, bad_words=bad_words))[0]
        for bad_words in ((), ("é",))
    )
    assert free.token_ids == same.token_ids
