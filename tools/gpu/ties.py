"""Tells answers that rounding makes differ from those that a fault does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.rehearsal import prompt_of

# Two tokens tie if their logits differ by less than this, in standard deviations of all logits, or by less than plain
# torch is off from itself for both: bfloat16 rounds as much away in another order of additions. Tokens picked at random
# differ by several.
NEAR_TIE = 0.1

Answers = list[list[int]]


def compare(
    runner: ModelRunner, block_size: int, prompts: list[list[int]], first: Answers, second: Answers
) -> Iterator[dict[str, Any]]:
    """Report for each pair of greedy answers that differ where, and whether the two tokens tie, by a plain runner."""
    for index, (prompt, a, b) in enumerate(zip(prompts, first, second, strict=True)):
        if a != b:
            place = first_difference(a, b)
            if place == min(len(a), len(b)):
                yield {"answer": index, "token": place, "is_near_tie": False, "lengths": [len(a), len(b)]}
                continue
            token_ids = prompt + a[:place]
            distance = tie_distance(runner, block_size, token_ids, a[place], b[place])
            limit = max(NEAR_TIE, 2 * rounding(runner, block_size, token_ids))
            yield {
                "answer": index, "token": place, "distance": distance, "limit": limit, "is_near_tie": distance < limit
            }  # fmt: skip


def first_difference(a: list[int], b: list[int]) -> int:
    """Return the first place at which two answers differ, or the length of the shorter one."""
    shorter = min(len(a), len(b))
    return next((place for place in range(shorter) if a[place] != b[place]), shorter)


@torch.inference_mode()
def tie_distance(runner: ModelRunner, block_size: int, token_ids: list[int], one: int, other: int) -> float:
    """Return how far the worse of two next tokens is behind the best one, in standard deviations of all logits."""
    launched = runner.launch(prompt_of(token_ids, block_size))
    logits = launched.logits[-1].float()
    runner.collect(launched)
    return float((logits.max() - logits[[one, other]].min()) / logits.std())


@torch.inference_mode()
def rounding(runner: ModelRunner, block_size: int, token_ids: list[int]) -> float:
    """Return by how much a logit of the next token changes, in standard deviations of all logits, if the last token is
    computed in a step of its own."""
    whole = runner.launch(prompt_of(token_ids, block_size))
    logits = whole.logits[-1].float().clone()
    runner.collect(whole)
    for step in (prompt_of(token_ids[:-1], block_size), prompt_of(token_ids, block_size, start=len(token_ids) - 1)):
        launched = runner.launch(step)
        runner.collect(launched)
    return float((logits - launched.logits[-1].float()).abs().max() / logits.std())
