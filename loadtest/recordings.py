"""Make prompts from a server's recording (`oaiserve serve --record-requests`): other tokens, but the same structure.

A recording has no text. For each prompt it has hashes of 64 tokens at a time, each with all before it. Tokens are drawn
with the hash as the seed, so prompts that began alike begin alike again, and the prefix cache has as much to find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from loadtest.errors import UsageError

HASH_DIGITS = 10  # hexadecimal digits of a block's hash
Tokens = Callable[[random.Random, int], str | list[int]]  # draws so many tokens, as ids or as words


def is_recording(first_row: dict[str, Any]) -> bool:
    """Return whether a file that begins with this row is a recording. Raises UsageError for one of another version."""
    if "recording" not in first_row:
        return False
    if first_row["recording"] != 1:
        raise UsageError(f"--requests is a recording of version {first_row['recording']}, but this reads version 1.")
    return True


def prompts_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a recording that can be sent again: those whose prompt is known, as rows of a trace.

    A request that was refused before its prompt was tokenized has no length, and is left out.
    """
    block_tokens = rows[0]["block_tokens"]
    return [
        {
            "timestamp": row["timestamp"],
            "output_length": max(1, row["output_length"]),
            "recorded": (row["input_length"], block_tokens, row["blocks"]),
            **_body(row),
        }
        for row in rows
        if "input_length" in row
    ]


def tokens_of(recorded: tuple[int, int, str], draw: Tokens, rng: random.Random) -> str | list[int]:
    """Return a prompt with the structure of a recorded one: its length, the size of its blocks, and their hashes.

    What follows the last whole block is drawn by `rng`, as are prompts shorter than a block.
    """
    length, block_tokens, hashes = recorded
    blocks = [hashes[start : start + HASH_DIGITS] for start in range(0, len(hashes), HASH_DIGITS)]
    prompt = draw(rng, 0)
    for block in blocks:
        prompt += draw(random.Random(block), block_tokens)  # type: ignore[operator]
    return prompt + draw(rng, length - len(blocks) * block_tokens)  # type: ignore[operator]


def _body(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that make it as much work as the recorded one."""
    body = {name: row["params"][name] for name in ("temperature", "top_p", "top_k", "min_p") if name in row["params"]}
    return body | ({"n": row["n"]} if row["n"] > 1 else {})
