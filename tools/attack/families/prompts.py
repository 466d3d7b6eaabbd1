"""Prompts that can never fit: their refusal must cost next to nothing, whatever they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from tools.attack.attack import CHAT, COMPLETIONS, FULL, Attack, Strike, outcomes

MB = 1_000_000
BODY_BYTES = 8 * 2**20 - 1024  # just within the default of --body-limit
WORDS = "The old river sings under seven hills, and nobody asks why. "


async def _flood(strike: Strike, path: str, body: Mapping[str, Any], number: int, at_once: int) -> None:
    content = json.dumps(body, ensure_ascii=False).encode()
    await strike.all([partial(strike.post, path, content)] * number, at_once)


def _text(part: str, num_bytes: int) -> str:
    return part * (num_bytes // len(part.encode()))


async def completions_8mb(strike: Strike) -> None:
    body = {"prompt": _text(WORDS, BODY_BYTES), "max_tokens": 1}
    await _flood(strike, COMPLETIONS, body, strike.number(200, 8), 8)


async def tokenize_8mb(strike: Strike) -> None:
    # Up to the limit of the route they are encoded, which takes a second each.
    await _flood(strike, "/tokenize", {"prompt": _text(WORDS, BODY_BYTES)}, strike.number(40, 8), 8)


async def chat_8mb(strike: Strike) -> None:
    body = {"messages": [{"role": "user", "content": _text(WORDS, BODY_BYTES)}], "max_tokens": 1}
    await _flood(strike, CHAT, body, strike.number(40, 4), 8)


async def repeated(strike: Strike, part: str) -> None:
    await _flood(strike, COMPLETIONS, {"prompt": _text(part, MB), "max_tokens": 1}, strike.number(16, 4), 4)


async def parts(strike: Strike) -> None:
    content = [{"type": "text", "text": "Word. " * 100} for _ in range(2000)]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    await _flood(strike, CHAT, body, strike.number(16, 4), 4)


async def messages(strike: Strike) -> None:
    body = {"messages": [{"role": "user", "content": "Word. "}] * 20_000, "max_tokens": 1}
    await _flood(strike, CHAT, body, strike.number(16, 4), 4)


async def detokenize(strike: Strike) -> None:
    await _flood(strike, "/detokenize", {"tokens": [7] * MB}, strike.number(16, 4), 4)


async def ids(strike: Strike) -> None:
    await _flood(strike, COMPLETIONS, {"prompt": [7] * MB, "max_tokens": 1}, strike.number(16, 4), 4)


async def many_prompts(strike: Strike) -> None:
    body = {"prompt": [f"{number}: {WORDS}" for number in range(2048)], "max_tokens": 1}
    await _flood(strike, COMPLETIONS, body, strike.number(4, 1), 2)


TOO_LONG = outcomes(400, 413) | FULL
ANY = TOO_LONG | outcomes(200)
ATTACKS = (
    Attack("completions-8mb", "8 MB of text that can never fit, 8 at once", completions_8mb, TOO_LONG),
    Attack("tokenize-8mb", "8 MB of text to /tokenize, 8 at once", tokenize_8mb, ANY, limit_seconds=180),
    Attack("chat-8mb", "a message of 8 MB, 8 at once", chat_8mb, TOO_LONG),
    Attack("prompt-spaces", "a prompt of a million spaces", partial(repeated, part=" "), TOO_LONG),
    Attack("prompt-one-letter", "a prompt of a million times a", partial(repeated, part="a"), TOO_LONG),
    Attack("prompt-emoji", "a megabyte of emoji", partial(repeated, part="\N{GRINNING FACE}"), TOO_LONG),
    Attack("content-parts", "a message of 2,000 parts", parts, TOO_LONG),
    Attack("many-messages", "20,000 messages", messages, TOO_LONG),
    Attack("detokenize-million", "a million ids to /detokenize", detokenize, ANY),
    Attack("prompt-ids", "a prompt of a million ids", ids, TOO_LONG),
    Attack("many-prompts", "2,048 prompts in one body", many_prompts, ANY, answer_seconds=120, is_work=True),
)
