"""Prompts that can never fit: their refusal must cost next to nothing, whatever they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.attack.attack import CHAT, COMPLETIONS, FULL, Number, Sent, burst, outcomes, post

MB = 1_000_000
BODY_BYTES = 8 * 2**20 - 1024  # just within the default of --body-limit
WORDS = "The old river sings under seven hills, and nobody asks why. "
TOO_LONG = outcomes(400, 413) | FULL
ANY = TOO_LONG | outcomes(200)


def text(part: str, num_bytes: int) -> str:
    return part * (num_bytes // len(part.encode()))


def same(path: str, body: Mapping[str, Any], number: int) -> list[Sent]:
    return [post(path, json.dumps(body, ensure_ascii=False).encode())] * number


@burst("8 MB of text that can never fit, 8 at once", TOO_LONG, 8)
def completions_8mb(number: Number) -> list[Sent]:
    return same(COMPLETIONS, {"prompt": text(WORDS, BODY_BYTES), "max_tokens": 1}, number(200, 8))


@burst("8 MB of text to /tokenize, 8 at once", ANY, 8, limit_seconds=180)
def tokenize_8mb(number: Number) -> list[Sent]:
    # Up to the limit of the route they are encoded, which takes a second each.
    return same("/tokenize", {"prompt": text(WORDS, BODY_BYTES)}, number(40, 8))


@burst("a message of 8 MB, 8 at once", TOO_LONG, 8)
def chat_8mb(number: Number) -> list[Sent]:
    body = {"messages": [{"role": "user", "content": text(WORDS, BODY_BYTES)}], "max_tokens": 1}
    return same(CHAT, body, number(40, 4))


@burst("a prompt of a million spaces", TOO_LONG, 4)
def prompt_spaces(number: Number) -> list[Sent]:
    return same(COMPLETIONS, {"prompt": " " * MB, "max_tokens": 1}, number(16, 4))


@burst("a prompt of a million times a", TOO_LONG, 4)
def prompt_one_letter(number: Number) -> list[Sent]:
    return same(COMPLETIONS, {"prompt": "a" * MB, "max_tokens": 1}, number(16, 4))


@burst("a megabyte of emoji", TOO_LONG, 4)
def prompt_emoji(number: Number) -> list[Sent]:
    return same(COMPLETIONS, {"prompt": text("\N{GRINNING FACE}", MB), "max_tokens": 1}, number(16, 4))


@burst("a message of 2,000 parts", TOO_LONG, 4)
def content_parts(number: Number) -> list[Sent]:
    content = [{"type": "text", "text": "Word. " * 100} for _ in range(2000)]
    return same(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}, number(16, 4))


@burst("20,000 messages", TOO_LONG, 4)
def many_messages(number: Number) -> list[Sent]:
    return same(CHAT, {"messages": [{"role": "user", "content": "Word. "}] * 20_000, "max_tokens": 1}, number(16, 4))


@burst("a million ids to /detokenize", ANY, 4)
def detokenize_million(number: Number) -> list[Sent]:
    return same("/detokenize", {"tokens": [7] * MB}, number(16, 4))


@burst("a prompt of a million ids", TOO_LONG, 4)
def prompt_ids(number: Number) -> list[Sent]:
    return same(COMPLETIONS, {"prompt": [7] * MB, "max_tokens": 1}, number(16, 4))


@burst("2,048 prompts in one body", ANY, 2, answer_seconds=120, is_work=True)
def many_prompts(number: Number) -> list[Sent]:
    body = {"prompt": [f"{i}: {WORDS}" for i in range(2048)], "max_tokens": 1}
    return same(COMPLETIONS, body, number(4, 1))
