"""Well-formed work, but more of it than one client should get done before others."""

from __future__ import annotations

from functools import partial

from tools.attack.attack import COMPLETIONS, FULL, Number, Sent, burst, outcomes, post

WORDS = ("river", "hill", "seven", "why", "under", "old", "sings", "fox", "sea", "then")
crowd = partial(burst, outcomes=outcomes(200, 400) | FULL, answer_seconds=120, limit_seconds=130, is_work=True)


def prompt(number: int, num_words: int) -> str:
    """Return a prompt that begins like no other, so that nothing of it is cached."""
    return f"{number}: " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(num_words))


def prompts(num_prompts: int, num_words: int, **fields: object) -> list[Sent]:
    return [post(COMPLETIONS, {"prompt": prompt(number, num_words), **fields}) for number in range(num_prompts)]


@crowd("16 prompts with n = 128 in one body", at_once=1, name="2048-sequences")
def sequences(number: Number) -> list[Sent]:
    fields = {"n": number(128, 16), "max_tokens": 8, "ignore_eos": True}
    return [post(COMPLETIONS, {"prompt": [prompt(each, 20) for each in range(16)], **fields})]


@crowd("64 prompts of 1,500 words from one address, 32 at once", at_once=32)
def long_prompts(number: Number) -> list[Sent]:
    return prompts(number(64, 8), 1500, max_tokens=1)


@crowd("128 answers of 60 tokens at once", at_once=128)
def long_answers(number: Number) -> list[Sent]:
    return prompts(number(128, 16), 10, max_tokens=60, ignore_eos=True)


@crowd("2,000 small requests, 1,500 at once", at_once=1500)
def many_requests(number: Number) -> list[Sent]:
    return prompts(number(2000, 200), 10, max_tokens=4)
