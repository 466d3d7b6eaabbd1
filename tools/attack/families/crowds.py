"""Well-formed work, but more of it than one client should get done before others."""

from __future__ import annotations

from functools import partial

from tools.attack.attack import COMPLETIONS, FULL, Attack, Strike, outcomes

WORDS = ("river", "hill", "seven", "why", "under", "old", "sings", "fox", "sea", "then")


def prompt(number: int, num_words: int) -> str:
    """Return a prompt that begins like no other, so that nothing of it is cached."""
    return f"{number}: " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(num_words))


async def sequences(strike: Strike) -> None:
    prompts = [prompt(number, 20) for number in range(16)]
    await strike.post(
        COMPLETIONS, {"prompt": prompts, "n": strike.number(128, 16), "max_tokens": 8, "ignore_eos": True}
    )


async def long_prompts(strike: Strike) -> None:
    bodies = [{"prompt": prompt(number, 1500), "max_tokens": 1} for number in range(strike.number(64, 8))]
    await strike.all([partial(strike.post, COMPLETIONS, body) for body in bodies], 32)


async def many_requests(strike: Strike) -> None:
    bodies = [{"prompt": prompt(number, 10), "max_tokens": 4} for number in range(strike.number(2000, 200))]
    await strike.all([partial(strike.post, COMPLETIONS, body) for body in bodies], strike.number(1500, 150))


async def long_answers(strike: Strike) -> None:
    body = {"max_tokens": 60, "ignore_eos": True}
    bodies = [body | {"prompt": prompt(number, 10)} for number in range(strike.number(128, 16))]
    await strike.all([partial(strike.post, COMPLETIONS, body) for body in bodies], 128)


DONE = outcomes(200, 400) | FULL
ATTACKS = (
    Attack("2048-sequences", "16 prompts with n = 128 in one body", sequences, DONE, answer_seconds=120,
           limit_seconds=130, is_work=True),
    Attack("long-prompts", "64 prompts of 1,500 words from one address, 32 at once", long_prompts, DONE,
           answer_seconds=120, limit_seconds=130, is_work=True),
    Attack("long-answers", "128 answers of 60 tokens at once", long_answers, DONE, answer_seconds=120,
           limit_seconds=130, is_work=True),
    Attack("many-requests", "2,000 small requests, 1,500 at once", many_requests, DONE, answer_seconds=120,
           limit_seconds=130, is_work=True),
)  # fmt: skip
