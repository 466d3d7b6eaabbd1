"""Requests of all kinds, and all that an engine on a small model gives for them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Event, Grammar, PromptDone, Request, SamplingParams, TokenPrompt
from tests.engine.doubles import Leaver
from tests.engine.logprobs_for_tests import values_of
from tests.engine.model.runners import IN_SMALL_BLOCKS, chunks_of, eager_runner, make_engine, run_requests

EOS = 40  # of 97 ids that are drawn; the tokenizer has one for each byte
NUM_REQUESTS = 120
GRAMMAR = Grammar("json_schema", '{"enum": ["hello,hello", "ZZTOP", "ABCDEF", "xyz"]}')  # "I" is the end of sequence


class CountingExecutor(EagerExecutor):
    """Counts the ids that are taken from the step before on the device."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_unknown = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.num_unknown += len(batch.unknown_rows)
        return super().forward(batch)


class Answer(NamedTuple):
    """The answer of one choice."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[float]


class Run(NamedTuple):
    answers: dict[tuple[str, int], Answer]  # by request and choice
    prompt_logprobs: dict[str, list[float]]
    usage: dict[str, tuple[int, int]]  # tokens of prompt and answers
    ended: dict[str, Event]
    requests: list[Request]
    num_preemptions: int
    num_unknown: int


def some_requests(seed: int) -> list[Request]:
    """Return requests of all kinds: with several choices, common prefixes, all kinds of ends, edits and logprobs."""
    rng = random.Random(seed)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = [*range(rng.randrange(3) * 6), *(rng.randrange(97) for _ in range(rng.randint(1, 16)))]
        edits: dict[str, Any] = rng.choice(
            [*[{}] * 25, {"repetition_penalty": 1.3}, {"bad_words": ("AB", "x")}, *[{"min_tokens": 5}] * 3]
            + [{"grammar": GRAMMAR}] * 6
        )
        ends: dict[str, Any] = rng.choice([*[{}] * 3, {"stop": ("A", "bc", "7")}, {"stop_token_ids": (11, 12, 13)}])
        asked: dict[str, Any] = rng.choice([*[{}] * 4, {"logprobs": 2}, {"prompt_logprobs": 1}])
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 8, 16]),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            n=rng.choice([1, 1, 2, 3]),
            ignore_eos=rng.random() < 0.3,
            **edits,
            **ends,
            **asked,
        )
        requests.append(Request(f"r{i}", (TokenPrompt(prompt),), params))
    return requests


def run(
    loaded: LoadedModel,
    requests: list[Request],
    *,
    overlap: bool,
    num_blocks: int,
    leaves: dict[str, int] | None = None,
    executor: type[CountingExecutor] = CountingExecutor,
    drafts: Any = None,
) -> Run:
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=4, executor=executor)
    runner.is_asynchronous = overlap  # steps overlap as on a GPU
    engine = make_engine(loaded, runner, num_blocks, eos=EOS, max_running=12, max_step_tokens=24, **IN_SMALL_BLOCKS)
    engine._loop._stepper._drafts = drafts
    with engine:
        ended, events = run_requests(engine, requests, Leaver(engine, leaves or {}))
    scheduler = engine._loop._scheduler
    scheduler.check_integrity()
    assert (scheduler.pool.num_used, len(scheduler.running), scheduler.num_waiting, scheduler.num_parked) == (0,) * 4
    answers = {
        key: Answer(
            [token_id for chunk in of_choice for token_id in chunk.token_ids],
            "".join(chunk.text for chunk in of_choice),
            of_choice[-1].finish_reason,
            of_choice[-1].stop_reason,
            [value for chunk in of_choice for value in values_of(chunk.logprobs)],
        )
        for key, of_choice in chunks_of(events).items()
    }
    return Run(
        answers,
        {e.request_id: values_of(e.logprobs)[1:] for e in events if isinstance(e, PromptDone) and e.logprobs},
        {key: (event.usage.prompt_tokens, event.usage.completion_tokens) for key, event in ended.items()},  # type: ignore[union-attr]
        ended,
        requests,
        scheduler.num_preemptions,
        runner._executor.num_unknown,
    )


def check_answers(found: Run, expected: Run) -> None:
    """Assert that clients got the same, except for rounding of log-probabilities."""
    for key, answer in expected.answers.items():
        assert found.answers[key]._replace(logprobs=[]) == answer._replace(logprobs=[]), key
        assert found.answers[key].logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert found.usage == expected.usage
    assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
    for request_id, logprobs in expected.prompt_logprobs.items():
        assert found.prompt_logprobs[request_id] == pytest.approx(logprobs, abs=1e-4)
