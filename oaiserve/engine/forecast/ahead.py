"""Follows the queue ahead of a request, step by step, by the learnt cost of steps: when does its first token come?

It knows the rules of the scheduler by and large: decodes first, then prompts in their order within the time of a step,
and no more sequences than may run. It jumps over steps in which nothing changes. Plain arithmetic, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from oaiserve.engine.pacing import LEAST_SECONDS, UNIT, efficient
from oaiserve.explain.step_cost import Load, StepCost

MOST_TURNS = 600  # of the loop: what is left of a longer queue takes as long as what went before
SHORT_BESIDE, SHORTER_SHARE = 8, 0.3  # as in the scheduler


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings by which steps are filled."""

    max_running: int
    max_step_tokens: int
    target_seconds: float | None = None
    itl_target_seconds: float | None = None


class Decoding(NamedTuple):
    """A sequence that decodes."""

    tokens_left: int
    context: int


class Prompt(NamedTuple):
    """A sequence whose prompt is not computed."""

    tokens_left: int
    start: int  # tokens before, which it attends to
    answer_tokens: int
    is_running: bool = False  # or else it waits for a place


class Ahead(NamedTuple):
    """What the queue makes of a request's first token."""

    first_token_ns: float
    num_decodes: int  # beside it, then
    context: float  # that these attend to, added up
    has_waited: bool  # for a place


def first_token(
    cost: StepCost, rules: StepRules, decodes: Iterable[Decoding], prompts: list[Prompt], place: int, host_ns: float
) -> Ahead:
    """Return when the prompt at this place of the order has its first token, from the end of the step under way.

    The prompts are in the order in which they are computed. `host_ns` is the time between two steps.
    """
    step, context, now_ns = 0, 0.0, 0.0
    ends: list[tuple[int, int]] = []  # a heap of decodes: after which step, and the context that they have then
    for decode in decodes:
        ends.append((decode.tokens_left, decode.context + decode.tokens_left))
        context += decode.context
    heapify(ends)
    target_ns, least = _target(cost, rules)
    left = [prompt.tokens_left for prompt in prompts]
    is_running = [prompt.is_running for prompt in prompts]
    num_prompts = sum(is_running)
    wanted = left[place]
    queue = list(range(len(prompts)))
    fitting: dict[tuple[int, int], int] = {}
    has_waited = False
    total = sum(left[: place + 1])
    for turn in range(MOST_TURNS):
        num_decodes = len(ends)
        free = rules.max_running - num_decodes - num_prompts
        decodes_load = Load(num_decodes, int(context), 0, 0, 0, num_decodes)
        decodes_ns = cost.expected_ns(decodes_load)
        budget = max(1, rules.max_step_tokens - num_decodes)
        taken: list[tuple[int, int]] = []
        used = used_context = 0
        room = -1
        for number, index in enumerate(queue):
            if not is_running[index]:
                if free <= 0:
                    break
                free -= 1
                is_running[index] = True
                num_prompts += 1
            if room < 0:
                key = (num_decodes >> 2, prompts[index].start + prompts[index].tokens_left - left[index] >> 9)
                room = fitting.get(key, -1)
                if room < 0:
                    start = prompts[index].start + prompts[index].tokens_left - left[index]
                    itl_ns = rules.itl_target_seconds
                    most_ns = decodes_ns + target_ns if itl_ns is None or not num_decodes else itl_ns * 1e9
                    enough = least if itl_ns is None or not num_decodes else UNIT
                    room = fitting[key] = _fitting(cost, decodes_load, start, most_ns, enough, rules.max_step_tokens)
                room = min(room, budget)
            part = min(left[index], room - used)
            if part < left[index] and number + 1 < len(queue) and left[queue[number + 1]] < left[index]:
                part = (part + 1) // 2
            if part <= 0:
                break
            start = prompts[index].start + prompts[index].tokens_left - left[index]
            used_context += part * (2 * start + part - 1) // 2
            used += part
            taken.append((index, part))
            if used >= room or len(taken) >= budget:
                break
        if not taken:
            if not ends:  # nothing runs, and nothing may: the limits are the reader's
                break
            has_waited = True
            steps = max(1, ends[0][0] - step)
            now_ns += steps * (decodes_ns + host_ns)
            context += num_decodes * steps
        else:
            ended = [index for index, part in taken if part >= left[index]]
            steps = 1
            if not ended and len(taken) == 1:
                steps = max(1, (left[taken[0][0]] - 1) // taken[0][1])
                if ends:
                    steps = max(1, min(steps, ends[0][0] - step))
            ns = cost.expected_ns(Load(num_decodes, int(context), 0, used, used_context, num_decodes + len(ended)))
            now_ns += steps * (ns + host_ns)
            context += num_decodes * steps
            for index, part in taken:
                left[index] -= part * steps
            step_ends = step + steps
            for index in ended:
                queue.remove(index)
                num_prompts -= 1
                if index == place:
                    return Ahead(now_ns, num_decodes, context, has_waited)
                one = prompts[index]
                if one.answer_tokens > 1:
                    whole = one.start + one.tokens_left
                    heappush(ends, (step_ends + one.answer_tokens - 1, whole + one.answer_tokens - 1))
                    context += whole
        step += steps
        while ends and ends[0][0] <= step:
            context -= heappop(ends)[1]
        context = max(context, 0.0)
        if turn == MOST_TURNS - 1:
            done = total - sum(max(0, left[index]) for index in range(place + 1))
            now_ns *= total / max(done, 1)
    return Ahead(now_ns + cost.expected_ns(Load(0, 0, 0, max(1, wanted), 0, 1)), len(ends), context, has_waited)


def _target(cost: StepCost, rules: StepRules) -> tuple[float, int]:
    """Return the time that prompts may take in a step, and the tokens that they may always have, as `StepTime` has."""
    rows, ns = efficient(cost, rules.max_step_tokens)
    if rules.target_seconds is not None:
        return rules.target_seconds * 1e9, UNIT
    return max(LEAST_SECONDS * 1e9, ns), rows


def _fitting(cost: StepCost, decodes: Load, start: int, most_ns: float, least: int, most: int) -> int:
    """Return how many tokens of a prompt from `start` on fit beside the decodes into a time, in units."""

    def expected_ns(units: int) -> int:
        tokens = units * UNIT
        return cost.expected_ns(
            decodes._replace(prompt_tokens=tokens, prompt_context=tokens * (2 * start + tokens - 1) // 2)
        )

    units = bisect_right(range(1, most // UNIT + 1), most_ns, key=expected_ns)
    return max(units * UNIT, least - decodes.decodes, UNIT)
