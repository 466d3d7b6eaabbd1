"""Requests of all kinds, and the answers of an engine on a small model."""

import random
from typing import Any

from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.request import Finished, Grammar, Request, SamplingParams, TokenPrompt
from tests.engine.answers import Answers, run_to_the_end
from tests.engine.model.runners import IN_SMALL_BLOCKS, make_engine
from tests.models.described import SmallModel

EOS = 40  # one of 97 ids that are drawn; the tokenizer has one for each byte
GRAMMAR = Grammar("json_schema", '{"enum": ["hello,hello", "ZZTOP", "ABCDEF", "xyz"]}')  # "I" is the end of sequence
EDITS: list[dict[str, Any]] = [
    *({"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.2, "bad_words": ("AB", "x")}),
    *({"bad_words": ("AB", "x")}, {"logit_bias": {7: 3.0}}),
    *({"allowed_token_ids": (5, 6, 7, 8)}, *[{"min_tokens": 5}] * 3, *[{"grammar": GRAMMAR}] * 6),
]
DRAWS: list[dict[str, Any]] = [
    *[{"temperature": 0.0}] * 4,
    *({}, {"min_p": 0.05}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 0.5, "top_k": 40, "top_p": 0.9}),
]


def some_requests(seed: int, number: int = 120, share_edited: float = 0.3) -> list[Request]:
    """Return requests of all kinds: with several choices, common prefixes, all kinds of ends, edits and logprobs."""
    rng = random.Random(seed)
    requests = []
    for i in range(number):
        prompt = [*range(rng.randrange(3) * 6), *(rng.randrange(97) for _ in range(rng.randint(1, 16)))]
        edits = rng.choice(EDITS) if rng.random() < share_edited else {}
        ends: dict[str, Any] = rng.choice([*[{}] * 3, {"stop": ("A", "bc", "7")}, {"stop_token_ids": (11, 12, 13)}])
        options = rng.choice([{"logprobs": 2}, {"prompt_logprobs": 1}]) if rng.random() < share_edited else {}
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 8, 16]),
            seed=i,
            n=rng.choice([1, 1, 2, 3]),
            ignore_eos=rng.random() < 0.3,
            **rng.choice(DRAWS),
            **edits,
            **ends,
            **options,
        )
        requests.append(Request(f"r{i}", (TokenPrompt(prompt),), params))
    return requests


def run(
    loaded: SmallModel,
    runner: ModelRunner,
    requests: list[Request],
    num_blocks: int,
    *,
    drafts: Any = None,
    max_running: int = 12,
    max_step_tokens: int = 24,
) -> Answers:
    """Return the answers of an engine on this runner, none of which fails."""
    sizes = IN_SMALL_BLOCKS | {"max_running": max_running, "max_step_tokens": max_step_tokens, "tokenize_workers": 0}
    engine = make_engine(loaded, runner, num_blocks, eos=EOS, drafter=drafts, **sizes)
    outcome = run_to_the_end(engine, requests, num_later=len(requests) // 2)
    assert all(isinstance(event, Finished) for event in outcome.ended.values()), outcome.ended
    return outcome
