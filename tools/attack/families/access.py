"""Attacks with keys: wrong ones, and what one of them may find of another. tests/routes has the rest."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tools.attack.attack import (
    ATTACKER_KEY,
    CHAT,
    COMPLETIONS,
    HI,
    NEIGHBOUR_KEY,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
)
from tools.attack.wire import few_at_once

KEYS = Family("keys", "admin rights")
QUESTION = {"messages": HI, "max_tokens": 1}
DENIED = outcomes(401, 429)


@KEYS.burst("wrong keys, each another one", DENIED, 16)
def wrong_keys(number: Number) -> list[Sent]:
    return [post(CHAT, QUESTION, key=f"sk-wrong-and-secret-{i}") for i in range(number(1000, 100))]


@KEYS.burst("8 MB without a key", DENIED | outcomes("reset"), 16)
def key_before_body(number: Number) -> list[Sent]:
    """A client without a key must not make the server read, parse or keep a body."""
    return [post(COMPLETIONS, b'{"prompt": "' + b"x" * (8 << 20) + b'"}', key=None)] * number(64, 8)


RED_OR_BLUE = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["red", "blue"]}}}
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"temperature": 1.0}), (CHAT, {"response_format": RED_OR_BLUE}), (CHAT, {"n": 3, "temperature": 1.2}),
    (CHAT, {"logprobs": True, "top_logprobs": 3}), (COMPLETIONS, {"temperature": 0}),
    (COMPLETIONS, {"presence_penalty": 1.5, "repetition_penalty": 1.3}), (COMPLETIONS, {"logit_bias": {"500": 5}}),
    (COMPLETIONS, {"echo": True, "logprobs": 2, "stop": ["e "]}), (COMPLETIONS, {"allowed_token_ids": [9, 11, 13]}),
    (COMPLETIONS, {"structured_outputs": {"regex": "[a-z]{4,30}"}}),
)  # fmt: skip


@KEYS.attack("seeded requests of ten forms, at rest and beside hostile ones", outcomes(200, 400, 429), is_work=True,
              answer_seconds=120, limit_seconds=300, of_class="state that leaks between requests")  # fmt: skip
async def victims_bytes(strike: Strike) -> None:
    def seeded(at: int, seed: int, key: str, **more: object) -> Sent:
        path, fields = FORMS[at % len(FORMS)]
        prompt: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": f"Tell me of {seed}"}
        return post(path, prompt | {"max_tokens": 16, "seed": seed} | fields | more, key=key)

    async def choices(at: int) -> Any:
        answer = await strike.ask(seeded(at, 5, NEIGHBOUR_KEY))
        return json.loads(answer.body)["choices"] if answer.status == 200 else answer.outcome

    at_rest = [await choices(at) for at in range(len(FORMS))]

    async def same(at: int) -> None:
        answer = await choices(at)
        strike.check(answer in (at_rest[at], "429"), f"{FORMS[at]} got {answer} instead of {at_rest[at]}")

    async def hostile(at: int) -> None:
        await strike.ask(seeded(at + 3, at, ATTACKER_KEY, n=4, temperature=2, frequency_penalty=2))

    beside = [partial(each, at) for at in range(len(FORMS)) for each in (same, hostile)]
    await few_at_once(beside * strike.number(10, 2), 16)
