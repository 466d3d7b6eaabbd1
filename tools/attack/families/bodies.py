"""Attacks by what a request holds: prompts, work, values and forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from tools.attack.attack import (
    CHAT,
    COMPLETIONS,
    FULL,
    HI,
    REFUSED,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
    request,
)

# -- prompts that can never fit: their refusal must cost next to nothing, whatever they are made of -------------------

PROMPTS = Family("prompts", "one request ends the engine")
MB = 1_000_000
BODY_BYTES = 8 * 2**20 - 1024  # just within the default of --body-limit
SENTENCE = "The old river sings under seven hills, and nobody asks why. "
TOO_LONG = outcomes(400, 413) | FULL
ANY = TOO_LONG | outcomes(200)


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


EMOJI = "\N{GRINNING FACE}" * (MB // 4)
PART = {"type": "text", "text": "Word. " * 100}
flood("completions-8mb", "8 MB of text that can never fit, 8 at once", COMPLETIONS, lambda: prompt(long_text()),
      (200, 8), 8)  # fmt: skip
# Up to the limit of the route they are encoded, which takes a second each.
flood("tokenize-8mb", "8 MB of text to /tokenize, 8 at once", "/tokenize", lambda: {"prompt": long_text()}, (40, 8), 8,
      ANY, limit_seconds=180)  # fmt: skip
flood("chat-8mb", "a message of 8 MB, 8 at once", CHAT, lambda: messages(long_text()), (40, 4), 8)
flood("prompt-spaces", "a prompt of a million spaces", COMPLETIONS, lambda: prompt(" " * MB))
flood("prompt-one-letter", "a prompt of a million times a", COMPLETIONS, lambda: prompt("a" * MB))
flood("prompt-emoji", "a megabyte of emoji", COMPLETIONS, lambda: prompt(EMOJI))
flood("content-parts", "a message of 2,000 parts", CHAT, lambda: messages([PART] * 2000))
flood("many-messages", "20,000 messages", CHAT, lambda: messages("Word. ", 20_000))
flood("detokenize-million", "a million ids to /detokenize", "/detokenize", lambda: {"tokens": [7] * MB}, outcomes=ANY)
flood("prompt-ids", "a prompt of a million ids", COMPLETIONS, lambda: prompt([7] * MB))
flood("many-prompts", "2,048 prompts in one body", COMPLETIONS,
      lambda: prompt([f"{number}: {SENTENCE}" for number in range(2048)]), (4, 1), 2, ANY, answer_seconds=120,
      is_work=True)  # fmt: skip


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


# -- names without end: no metric and no line of the log may grow with them ------------------------------------------
# Hostile values are those of `generated`, tools.attack.growth and tools.attack.fuzz.

NAMES = Family("names", "one request ends the engine")
DONE = REFUSED | outcomes(200)


@NAMES.attack("2,000 unknown parameters, and 50,000 in one body", DONE, is_work=True)
async def unknown_names(strike: Strike) -> None:
    body = {"prompt": "Hi", "max_tokens": 0}
    names = [post(COMPLETIONS, body | {f"unknown_{i}_{'x' * 200}": i}) for i in range(strike.number(2000, 200))]
    flood = post(COMPLETIONS, body | {f"flood_{i}\n{'y' * 100}": i for i in range(50_000)})
    await strike.ask_all([*names, flood], 16)
    unfolded = [line for line in strike.log.splitlines() if line.startswith(b"yyy")]
    strike.check(not unfolded, "a name of the client began a line of the log")


@NAMES.attack("2,000 unknown paths, methods and ids", DONE, bare=True)
async def unknown_paths(strike: Strike) -> None:
    """Another path, method and request id with each request: no metric and no line of log may grow with them."""
    before = await strike.ask(request("GET", "/metrics"))
    asks = [
        request(("GET", "POST", "PUT", f"M{i}")[i % 4], f"/v1/nothing/{i}/{'p' * 300}", headers={
                "x-request-id": f"id-{i}", "traceparent": f"00-{i + 1:032x}-{i + 1:016x}-01", "user-agent": "u" * 999})
        for i in range(strike.number(2000, 200))
    ]  # fmt: skip
    await strike.ask_all(asks, 16)
    after = await strike.ask(request("GET", "/metrics"))
    growth = after.num_body_bytes - before.num_body_bytes
    strike.check(growth < 20_000, f"/metrics grew by {growth:,} bytes")


@NAMES.burst('chat_template_kwargs {"self": 1} and other names', outcomes(200, 400), 1, limit_seconds=120, is_work=True,
             of_class="templates")  # fmt: skip
def template_arguments(number: Number) -> list[Sent]:
    """Names that the template, its environment or the code that calls it use themselves."""
    names = ("self", "messages", "tools", "conversation", "chat_template", "add_generation_prompt", "loop", "namespace",
             "raise_exception", "strftime_now", "tokenizer", "context", "environment", "args", "kwargs", "tokenize",
             "return_dict", "padding", "truncation", "max_length", "return_tensors", "__class__", "bos_token", "",
             "continue_final_message", "documents", "return_assistant_tokens_mask")  # fmt: skip
    return [
        post(CHAT, {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {name: value}})
        for name in names
        for value in (1, None, {"self": 1}, "{{ 7 * 7 }}")
    ]
