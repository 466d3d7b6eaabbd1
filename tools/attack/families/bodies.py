"""Attacks by what a request holds: prompts and work. Hostile values are those of tools.attack.fuzz."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from tools.attack.attack import (
    CHAT,
    COMPLETIONS,
    FULL,
    REFUSED,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
)
from tools.attack.forms import Form, forms

# -- prompts that can never fit: their refusal must cost next to nothing, whatever they are made of -------------------

PROMPTS = Family("prompts", "one request ends the engine")
MB = 1_000_000
BODY_BYTES = 8 * 2**20 - 1024  # just within the default of --body-limit
SENTENCE = "The old river sings under seven hills, and nobody asks why. "
TOO_LONG = outcomes(400, 413) | FULL
ANY = REFUSED | TOO_LONG | outcomes(200)


def flood(
    name: str,
    sends: str,
    path: str,
    body: Callable[[], dict[str, Any]],
    numbers: tuple[int, int] = (16, 4),
    at_once: int = 4,
    outcomes: frozenset[str] = TOO_LONG,
    **limits: Any,
) -> None:
    """Add an attack that repeats the same body, fewer times in a quick run."""

    def same(number: Number) -> list[Sent]:
        return [post(path, json.dumps(body(), ensure_ascii=False).encode())] * number(*numbers)

    PROMPTS.burst(sends, outcomes, at_once, name=name, **limits)(same)


def prompt(content: Any) -> dict[str, Any]:
    return {"prompt": content, "max_tokens": 1}


def messages(content: Any, number: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * number, "max_tokens": 1}


def long_text() -> str:
    return SENTENCE * (BODY_BYTES // len(SENTENCE))


flood("completions-8mb", "8 MB of text that can never fit, 8 at once", COMPLETIONS, lambda: prompt(long_text()),
      (200, 8), 8)  # fmt: skip
# Up to the limit of the route they are encoded, which takes a second each.
flood("tokenize-8mb", "8 MB of text to /tokenize, 8 at once", "/tokenize", lambda: {"prompt": long_text()}, (40, 8), 8,
      ANY, limit_seconds=180)  # fmt: skip
flood("chat-8mb", "a message of 8 MB, 8 at once", CHAT, lambda: messages(long_text()), (40, 4), 8)
flood("many-messages", "20,000 messages", CHAT, lambda: messages("Word. ", 20_000))
flood("detokenize-million", "a million ids to /detokenize", "/detokenize", lambda: {"tokens": [7] * MB}, outcomes=ANY)
flood("many-prompts", "2,048 prompts in one body", COMPLETIONS,
      lambda: prompt([f"{number}: {SENTENCE}" for number in range(2048)]), (4, 1), 2, ANY, answer_seconds=120,
      is_work=True)  # fmt: skip


def of_form(form: Form, num_bytes: int) -> bytes:
    return post(form.path.replace("{conversation_id}", "none"), form.body(num_bytes), form.headers)


# `tools.attack.growth` measures their CPU time.
@PROMPTS.attack("bodies of all forms that cost much, 4 at once", ANY, answer_seconds=120, limit_seconds=3600,
                is_work=True)  # fmt: skip
async def growing(strike: Strike) -> None:
    num_bytes = strike.number(2**19, 2**16)
    chosen = forms()[:: strike.number(1, 20)]
    for begin in range(0, len(chosen), 16):  # All bodies at once would be a gigabyte.
        await strike.ask_all([of_form(form, num_bytes) for form in chosen[begin : begin + 16]], 4)


# -- well-formed work, but more of it than one client should get done before others -----------------------------------

CROWDS = Family("crowds", "a client that takes all")
WORDS = ("river", "hill", "seven", "why", "under", "old", "sings", "fox", "sea", "then")
crowd = partial(CROWDS.burst, outcomes=outcomes(200, 400) | FULL, answer_seconds=120, limit_seconds=130, is_work=True)


def fresh(number: int, num_words: int) -> str:
    """Return a prompt that begins like no other, so that nothing of it is cached."""
    return f"{number}: " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(num_words))


def prompts(num_prompts: int, num_words: int, **fields: object) -> list[Sent]:
    return [post(COMPLETIONS, {"prompt": fresh(number, num_words), **fields}) for number in range(num_prompts)]


@crowd("16 prompts with n = 128 in one body", at_once=1, name="2048-sequences")
def sequences(number: Number) -> list[Sent]:
    fields = {"n": number(128, 16), "max_tokens": 8, "ignore_eos": True}
    return [post(COMPLETIONS, {"prompt": [fresh(each, 20) for each in range(16)], **fields})]


@crowd("64 prompts of 1,500 words from one address, 32 at once", at_once=32)
def long_prompts(number: Number) -> list[Sent]:
    return prompts(number(64, 8), 1500, max_tokens=1)


@crowd("128 answers of 60 tokens at once", at_once=128)
def long_answers(number: Number) -> list[Sent]:
    return prompts(number(128, 16), 10, max_tokens=60, ignore_eos=True)


@crowd("2,000 small requests, 1,500 at once", at_once=1500)
def many_requests(number: Number) -> list[Sent]:
    return prompts(number(2000, 200), 10, max_tokens=4)
