"""Requests of all kinds, and the answers of an engine on a small model."""

import random
from typing import Any

from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Grammar, Request, SamplingParams, TokenPrompt
from tests.engine.answers import Answers, run_to_the_end
from tests.engine.model.runners import IN_SMALL_BLOCKS, eager_runner, make_engine

EOS = 40  # of 97 ids that are drawn; the tokenizer has one for each byte
NUM_REQUESTS = 120
GRAMMAR = Grammar("json_schema", '{"enum": ["hello,hello", "ZZTOP", "ABCDEF", "xyz"]}')  # "I" is the end of sequence


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
    drafts: Any = None,
) -> Answers:
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=4)
    runner.is_asynchronous = overlap  # steps overlap as on a GPU
    engine = make_engine(loaded, runner, num_blocks, eos=EOS, max_running=12, max_step_tokens=24, **IN_SMALL_BLOCKS)
    engine._loop._stepper._drafts = drafts
    return run_to_the_end(engine, requests)
