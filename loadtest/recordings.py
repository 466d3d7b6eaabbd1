"""Make prompts from a server's recording (`oaiserve serve --record-requests`), with other tokens but the same
structure.

A recording has no text. For each prompt it has a hash of every block of 64 tokens, chained with all blocks before it.
Each block's tokens are drawn with its hash as the seed, so prompts that had a common prefix have one again, and the
prefix cache gets as many hits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from loadtest.errors import UsageError
from oaiserve.wire import recordings

Tokens = Callable[[random.Random, int], str | list[int]]  # draws this number of tokens, as ids or as words


def is_recording(first_row: dict[str, Any]) -> bool:
    """Return whether a file whose first row is this one is a recording. Raises UsageError for a recording of another
    version."""
    try:
        return recordings.is_recording(first_row)
    except ValueError as error:
        raise UsageError(f"--requests cannot be sent: {error}.") from error


def prompts_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a recording that can be sent again, as rows of a trace.

    A request that was refused before its prompt was tokenized has no length, and is left out.
    """
    block_tokens = rows[0]["block_tokens"]
    return [
        {
            "timestamp": row["timestamp"],
            "output_length": max(1, row["output_length"]),
            "recorded": (row["input_length"], block_tokens, recordings.block_hashes(row)),
            **_body(row),
        }
        for row in rows
        if "input_length" in row
    ]


def tokens_of(recorded: tuple[int, int, list[str]], draw: Tokens, rng: random.Random) -> str | list[int]:
    """Return a prompt with the structure of the recorded one, given as its length, its block size, and its block
    hashes.

    Tokens after the last whole block have no hash, so `rng` draws them.
    """
    length, block_tokens, blocks = recorded
    prompt = draw(rng, 0)
    for block in blocks:
        prompt += draw(random.Random(block), block_tokens)  # type: ignore[operator]
    return prompt + draw(rng, length - len(blocks) * block_tokens)  # type: ignore[operator]


def _body(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that make it cost as much as the recorded one."""
    body = {name: row["params"][name] for name in ("temperature", "top_p", "top_k", "min_p") if name in row["params"]}
    return body | ({"n": row["n"]} if row["n"] > 1 else {})
