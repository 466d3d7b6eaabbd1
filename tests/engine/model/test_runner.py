"""A step's results with a small random model: log-probabilities as transformers has them, words that never come."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.load import LoadedModel, prepare
from oaiserve.engine.model.runner import BAD_LOGITS, NOTHING_LEFT, ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Logprobs, Step
from oaiserve.engine.tokenize import Tokenizer
from tools.random_models import FAMILIES, byte_tokenizer, random_model

PROMPTS = [[5, 9, 3, 17, 60], [90, 4, 4], [7] * 6, [11, 40, 12]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return prepare(random_model(FAMILIES["llama"]))


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    runner = ModelRunner(loaded, num_blocks=64, block_size=4)
    with Engine(
        tokenizer=Tokenizer(byte_tokenizer()),
        runner=runner,
        num_blocks=64,
        max_model_len=48,
        vocab_size=loaded.vocab_size,
        options=EngineOptions(block_size=4),
    ) as engine:
        yield engine


def step_of(params: list[SamplingParams]) -> Step:
    """All of PROMPTS, in one step."""
    step = Step()
    for i, prompt in enumerate(PROMPTS):
        sequence = Sequence(str(i), 0, prompt, params[i], max_len=40)
        sequence.blocks, sequence.wants_prompt_logprobs = [2 * i, 2 * i + 1], params[i].prompt_logprobs is not None
        step.chunks.append(Chunk(sequence, 0, len(prompt)))
    return step


def test_logprobs_of_prompts_and_tokens_are_those_of_the_model(loaded: LoadedModel) -> None:
    model = random_model(copy.deepcopy(FAMILIES["llama"]))  # a model writes into its config
    asked = [(2, None), (None, 3), (0, 0), (None, None)]
    params = [SamplingParams(temperature=0.0, logprobs=a, prompt_logprobs=b) for a, b in asked]
    runner = ModelRunner(loaded, num_blocks=8, block_size=4)
    results = runner.collect(runner.launch(step_of(params)))
    for prompt, (num_top, num_prompt_top), result in zip(PROMPTS, asked, results, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert result.token_id == expected[-1].argmax()
        assert (result.logprobs is None, result.prompt_logprobs is None) == (num_top is None, num_prompt_top is None)
        if result.logprobs is not None:
            check(result.logprobs, result.token_id, num_top, expected[-1])
        rows = result.prompt_logprobs or []
        for found, token_id, of_position in zip(rows, prompt[1:], expected, strict=False):
            check(found, token_id, num_prompt_top, of_position)
        assert len(rows) == (0 if num_prompt_top is None else len(prompt) - 1)


def check(found: Logprobs, token_id: int, num_top: int, expected: torch.Tensor) -> None:
    assert (found.token_id, found.logprob) == (token_id, pytest.approx(expected[token_id].item(), abs=1e-4))
    assert found.top_ids == expected.topk(num_top).indices.tolist()
    assert found.top_logprobs == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-4)


class BrokenRunner(ModelRunner):
    def forward(self, batch: object) -> torch.Tensor:
        logits = torch.zeros(4, 97)
        logits[1] = math.nan
        return logits


def test_a_sequence_without_a_token_is_told_why(loaded: LoadedModel) -> None:
    step = step_of([SamplingParams(logprobs=1), SamplingParams(logprobs=1), SamplingParams(), SamplingParams()])
    only = SamplingParams(allowed_token_ids=(5,))
    step.chunks[2] = Chunk(Sequence("2", 0, [7], only, max_len=40, bad_words=[[5]]), 0, 1)
    step.chunks[2].sequence.blocks = [4]
    runner = BrokenRunner(loaded, num_blocks=8, block_size=4)
    results = runner.collect(runner.launch(step))
    assert [result.error for result in results] == [None, BAD_LOGITS, NOTHING_LEFT, None]
    assert [result.token_id is None for result in results] == [False, True, True, False]


# -- bad_words, with a token per byte


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_greedy_answer_goes_around_its_bad_words(engine: Engine, length: int) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    free = engine.generate([[40, 50, 60]], params)[0]
    word = free.text[:length]
    assert len(word.encode()) == length, "the model's vocabulary is ASCII"
    assert " " not in word
    bad_words = tuple({word, free.text[length : 2 * length]})
    answer = engine.generate(
        [[40, 50, 60]], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, bad_words=bad_words)
    )[0]
    assert len(answer.token_ids) == 24
    assert answer.text != free.text
    assert not any(bad in answer.text for bad in bad_words)
    assert answer.token_ids[: length - 1] == free.token_ids[: length - 1]  # its beginning is not bad


def test_bad_words_that_the_model_cannot_generate_anyway_change_nothing(engine: Engine) -> None:
    free, same = (
        engine.generate([[40, 50, 60]], SamplingParams(max_tokens=9, temperature=0.0, bad_words=bad_words))[0]
        for bad_words in ((), ("é",))
    )
    assert free.token_ids == same.token_ids
