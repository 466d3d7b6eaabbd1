"""Makes random requests of all kinds: common prefixes, several choices, edits, grammars, log-probabilities, ends."""

from __future__ import annotations

import random
from typing import Any

from oaiserve.engine.request import Grammar, Request, SamplingParams, TokenPrompt

_GRAMMAR = Grammar("json_schema", '{"enum": ["hello,hello", "ZZTOP", "ABCDEF", "xyz"]}')
_EDITS: list[dict[str, Any]] = [
    *({"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": 0.4}, {"bad_words": ("AB", "x")}),
    *({"logit_bias": {7: 3.0}}, {"allowed_token_ids": (5, 6, 7, 8, 60)}, {"min_tokens": 5}),
]
_DRAWS: list[dict[str, Any]] = [
    *[{"temperature": 0.0}] * 4,
    *({}, {"min_p": 0.05}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 0.5, "top_k": 40, "top_p": 0.9}),
]
_PREFIXES = (1.0, 0.7, 0.4)  # lengths of the common prefixes, of the longest prompt
_SHARE_EDITED = 0.3
_SHARE_LEAVING = 0.1


def some_requests(
    seed: int, number: int, vocab_size: int, *, longest_prompt: int, longest_answer: int, has_grammars: bool
) -> list[Request]:
    rng = random.Random(seed)
    prefixes = [rng.choices(range(vocab_size), k=int(longest_prompt * share)) for share in _PREFIXES]
    edits = [*_EDITS, *[{"grammar": _GRAMMAR}] * 3] if has_grammars else _EDITS
    requests = []
    for index in range(number):
        own = rng.choices(range(vocab_size), k=rng.randint(1, longest_prompt // 2))
        prompt = [*rng.choice([[], *prefixes]), *own][: longest_prompt - rng.randrange(3)]
        is_edited = rng.random() < _SHARE_EDITED
        ends: dict[str, Any] = rng.choice([*[{}] * 3, {"stop": ("A", "bc", "7")}, {"stop_token_ids": (11, 12, 13)}])
        logprobs = rng.choice([*[{}] * 4, {"logprobs": 2}, {"prompt_logprobs": 1}])
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, longest_answer // 4, longest_answer // 2, longest_answer, longest_answer]),
            seed=index,
            n=rng.choice([1, 1, 1, 2]),
            ignore_eos=rng.random() < 0.5,
            **rng.choice(_DRAWS),
            **(rng.choice(edits) if is_edited else {}),
            **ends,
            **logprobs,
        )
        requests.append(Request(f"r{index}", (TokenPrompt(prompt),), params))
    return requests


def leaving(seed: int, requests: list[Request]) -> dict[str, int]:
    """Return the requests that leave, each with the number of tokens after which it does."""
    rng = random.Random(seed)
    return {one.request_id: rng.randint(1, 6) for one in requests if rng.random() < _SHARE_LEAVING}


def is_plain_greedy(params: SamplingParams) -> bool:
    """Return whether the best token of the model's own logits is drawn."""
    kept = ("n", "max_tokens", "seed", "stop", "ignore_eos", "logprobs", "prompt_logprobs")
    return params == SamplingParams(temperature=0.0, **{name: getattr(params, name) for name in kept})
