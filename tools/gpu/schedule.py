"""Checks a random schedule of hundreds of steps: the engine with kernels and graphs, and few blocks, and plain torch.

Sequences are preempted, find the begin of their prompts in the prefix cache, come and leave at any time, and draw in
all ways. What is asked is random and always the same. Which step computes what depends on time, and no answer may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig

from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Aborted, Event, Failed, PromptDone, Request, Terminal, TokenChunk
from oaiserve.engine.start.described import Described
from oaiserve.facts.step_record import StepKind
from oaiserve.runtime import Queue, Runtime
from tests.engine.logprobs_for_tests import values_of
from tests.models.small_configs import config_of
from tools.gpu.doubles import running
from tools.gpu.models import described_on, sensitive
from tools.gpu.requests import is_plain_greedy, leaving, some_requests
from tools.gpu.sections import Target
from tools.gpu.side_by_side import NO_NUMBERS, TOGETHER, checked
from tools.gpu.ties import NEAR_TIE, first_difference, tie_distance
from tools.gpu.workload import started

SEED = 5
LEAST_STEPS = 400
PLAIN = {"compile": False, "overlap": False}
LIMIT_SECONDS = 150.0
MOST_SHOWN = 20
# In float32, kernels and plain torch differ by about 1e-6 of the logits' deviation. Draws that noise of this size
# changes are near the border between two tokens.
NOISE = 1e-4
NOISY_RUNS = 8
MOST_NEAR_TIES = 0.03  # More of all choices are no chance.
LOGPROB_ERROR = 1e-2


class Sizes(NamedTuple):
    """How much is asked of an engine, and how little room it has."""

    requests: int
    at_once: int  # open requests
    longest_prompt: int
    longest_answer: int
    settings: dict[str, Any]


REAL = Sizes(200, 28, 200, 56, {"kv_blocks": 96, "max_running": 16, "max_step_tokens": 96, **TOGETHER})
TINY = Sizes(40, 10, 40, 12, {"block_size": 4, "kv_blocks": 24, "max_running": 5, "max_step_tokens": 24, **TOGETHER})
_FEW = {"num_hidden_layers": 2, "vocab_size": 8192}
_LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    sizes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)  # not those of the plain engine

    def config(self, *, is_small: bool) -> PreTrainedConfig:
        if is_small:
            return config_of(self.family)
        return sensitive(AutoConfig.for_model(self.family, **_FEW | self.sizes))


CASES = {
    "two layers of Llama 3.2 1B, float32": Case("llama", _LLAMA_1B),
    "two layers of Llama 3.2 1B, bfloat16": Case("llama", _LLAMA_1B, torch.bfloat16),
    "two layers of Llama 3.2 1B, host memory": Case("llama", _LLAMA_1B, settings={"kv_offload": Bytes("64MiB")}),
    "a convolution and an attention of LFM2, float32": Case(
        "lfm2", {**_LLAMA_1B, "layer_types": ["conv", "full_attention"]}
    ),
}


def run(target: Target) -> Iterator[dict[str, Any]]:
    yield from checked(list(CASES), f"{__name__}:check", target, at_once=len(CASES), limit_seconds=LIMIT_SECONDS)


def check(target: Target, name: str) -> dict[str, Any]:
    """Compare all that clients get with what they get of plain torch, and report what happened meanwhile."""
    case = CASES[name]
    sizes = TINY if target.quick else REAL
    model = described_on(case.config(is_small=target.quick), target.device, dtype=case.dtype)
    requests = some_requests(
        SEED,
        sizes.requests,
        model.spec.vocab_size,
        longest_prompt=sizes.longest_prompt,
        longest_answer=sizes.longest_answer,
        has_grammars=not target.is_dry,  # the token that a fake device draws is not of any grammar
    )
    leaves_after = leaving(SEED, requests)
    fast = answers(model, target, requests, leaves_after, sizes.at_once, sizes.settings | case.settings)
    plain = answers(model, target, requests, leaves_after, sizes.at_once, sizes.settings | PLAIN)
    found = {"fast": fast.happened, "plain": plain.happened}
    problems = [*fast.problems, *plain.problems, *unexercised(fast.happened, target)]
    if target.is_dry:
        return {"problem": NO_NUMBERS, **found} if not problems else {"equal": False, "problems": problems, **found}
    if case.dtype == torch.float32:
        different = explained(different_answers(fast, plain), requests, model, target, sizes)
        is_right = all(one["is_near_tie"] for one in different) and len(different) <= MOST_NEAR_TIES * len(fast.choices)
        found["near_ties"] = len(different)
    else:
        different = list(unequal_greedy(fast, plain, requests, model, target, sizes))
        is_right = all(one["is_near_tie"] for one in different)
        found["other_choices"] = sum(a.token_ids != b.token_ids for a, b in pairs(fast, plain))
    wrong = [one for one in different if not one["is_near_tie"]]
    return {
        "equal": is_right and not problems,
        "choices": len(fast.choices),
        **found,
        "wrong": len(wrong),
        "different": (wrong or different)[:MOST_SHOWN],
        "problems": problems,
    }


class Choice(NamedTuple):
    """All that a client gets of one choice."""

    token_ids: list[int]
    text: str
    ending: tuple[str | None, str | int | None]
    logprobs: list[float]


@dataclass
class Answers:
    choices: dict[tuple[str, int], Choice]  # keyed by request and number of the choice
    prompt_logprobs: dict[str, list[float]]
    ended: dict[str, Terminal]
    happened: dict[str, int]
    problems: list[str]


def answers(
    model: Described,
    target: Target,
    requests: list[Request],
    leaves_after: dict[str, int],
    at_once: int,
    settings: dict[str, Any],
) -> Answers:
    """Have an engine answer all requests, of which `at_once` are open together, and look at what it leaves behind."""
    with running(model, target, **settings) as engine:
        events = list(events_of(engine, requests, leaves_after, at_once, target.runtime))
        steps = engine.take_steps()
        numbers = engine.snapshot()
    ended = {event.request_id: event for event in events if isinstance(event, TERMINAL)}
    failed = [f"{name}: {event.error}" for name, event in ended.items() if isinstance(event, Failed)]
    happened = {
        "steps": len(steps),
        "mixed": sum(step.kind == StepKind.MIXED for step in steps),
        "preemptions": numbers.num_preemptions,
        "cached_tokens": numbers.num_prefix_hits,
        "left": sum(isinstance(event, Aborted) for event in ended.values()),
    }
    if "kv_offload" in settings and not target.quick:  # Tiny prompts are computed sooner than restored.
        happened["restored_prefixes"] = numbers.num_offload_hits
    if model.spec.state_shapes:
        del happened["cached_tokens"]  # few states are kept
    choices: dict[tuple[str, int], list[TokenChunk]] = {}
    prompt_logprobs = {}
    for event in events:
        if isinstance(event, TokenChunk):
            choices.setdefault((event.request_id, event.index), []).append(event)
        elif isinstance(event, PromptDone) and event.logprobs:
            prompt_logprobs[event.request_id] = values_of(event.logprobs)[1:]
    whole = {key: _whole(chunks) for key, chunks in sorted(choices.items())}
    return Answers(whole, prompt_logprobs, ended, happened, [*failed[:MOST_SHOWN], *left_over(engine)])


def _whole(chunks: list[TokenChunk]) -> Choice:
    return Choice(
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        "".join(chunk.text for chunk in chunks),
        (chunks[-1].finish_reason, chunks[-1].stop_reason),
        [value for chunk in chunks for value in values_of(chunk.logprobs)],
    )


def events_of(
    engine: Engine, requests: list[Request], leaves_after: dict[str, int], at_once: int, runtime: Runtime
) -> Iterator[Event]:
    """Submit requests, the next one whenever one has ended, and yield all events. Some leave after some tokens.

    All but the first one are submitted by the engine's thread, between its steps, so steps don't depend on how fast
    this thread is.
    """
    inbox: Queue[list[Event]] = runtime.queue()
    left = dict(leaves_after)
    first, *others = requests
    waiting = iter(others)

    def submit(number: int) -> None:
        for request in islice(waiting, number):
            engine.submit(request, deliver)

    def deliver(events: list[Event]) -> None:
        if any(event.request_id == first.request_id and isinstance(event, PromptDone) for event in events):
            submit(at_once - 1)
        for event in events:
            if isinstance(event, TokenChunk) and event.request_id in left:
                left[event.request_id] -= len(event.token_ids)
                if left[event.request_id] <= 0:
                    engine.abort(event.request_id)
        submit(sum(isinstance(event, TERMINAL) for event in events))
        inbox.put(events)

    engine.submit(first, deliver)
    num_open = len(requests)
    while num_open:
        events = inbox.get()
        yield from events
        num_open -= sum(isinstance(event, TERMINAL) for event in events)


def left_over(engine: Engine) -> list[str]:
    """Return a problem for each thing that an engine which has stopped should have given back and did not."""
    scheduler = engine._loop._scheduler
    problems = []
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        problems.append(f"the scheduler's memory: {error}")
    counts = {
        # Blocks may have been on their way from host memory, for a request that left.
        "blocks": scheduler.pool.num_used - (len({*scheduler.tier.held}) if scheduler.tier is not None else 0),
        "running sequences": len(scheduler.running),
        "waiting sequences": scheduler.foreground.num_waiting,
        "parked sequences": scheduler.foreground.num_parked,
        "states": 0 if scheduler.states is None else scheduler.states.num_owned,
    }
    problems += [f"{number} {name} are left" for name, number in counts.items() if number]
    if engine.failure is not None:
        problems.append(f"the engine failed: {engine.failure}")
    return problems


def unexercised(happened: dict[str, int], target: Target) -> list[str]:
    """Return a problem for each thing that a schedule should have had and did not: it would show nothing."""
    least = dict.fromkeys(happened, 1)
    if not target.quick:
        least["steps"] = LEAST_STEPS
    return [f"{happened[name]} {name}, less than {number}" for name, number in least.items() if happened[name] < number]


def pairs(fast: Answers, plain: Answers) -> Iterator[tuple[Choice, Choice]]:
    yield from ((choice, plain.choices[key]) for key, choice in fast.choices.items() if key in plain.choices)


def different_answers(fast: Answers, plain: Answers) -> list[dict[str, Any]]:
    """Return where answers differ: whole ones in all that a client gets, and others as far as they go."""
    different: list[dict[str, Any]] = []
    for key in fast.choices.keys() | plain.choices.keys():
        a, b = (one.choices.get(key, Choice([], "", (None, None), [])) for one in (fast, plain))
        place = first_difference(a.token_ids, b.token_ids)
        shortest = min(len(a.token_ids), len(b.token_ids))
        is_whole = not any(isinstance(one.ended.get(key[0]), Aborted) for one in (fast, plain))
        where = {"request": key[0], "choice": key[1], "token": place}
        if place < shortest:
            different.append({**where, "what": "tokens", "ids": [a.token_ids[place], b.token_ids[place]]})
        elif is_whole and (a[:3] != b[:3]):
            different.append({**where, "what": f"ends {a.ending} and {b.ending}"})
        elif not _are_close(a.logprobs, b.logprobs):
            different.append({**where, "what": "log-probabilities"})
    for name in fast.prompt_logprobs.keys() & plain.prompt_logprobs.keys():
        if not _are_close(fast.prompt_logprobs[name], plain.prompt_logprobs[name]):
            different.append({"request": name, "what": "log-probabilities of the prompt"})
    return sorted(different, key=lambda one: (one["request"], one.get("choice", 0)))


def _are_close(a: list[float], b: list[float]) -> bool:
    return all(math.isclose(x, y, rel_tol=LOGPROB_ERROR, abs_tol=LOGPROB_ERROR) for x, y in zip(a, b, strict=False))


def explained(
    different: list[dict[str, Any]], requests: list[Request], model: Described, target: Target, sizes: Sizes
) -> list[dict[str, Any]]:
    """Say of each difference whether it is near a tie: plain torch with noise in its logits gets the other token."""
    asked = {one["request"] for one in different if one["what"] == "tokens"}
    noisy = noisy_answers([request for request in requests if request.request_id in asked], model, target, sizes)
    rows = []
    for one in different:
        is_near_tie = False
        if one["what"] == "tokens":
            seen = {
                tuple(choice.token_ids[one["token"] : one["token"] + 1])
                for choices in noisy
                if (choice := choices.get((one["request"], one["choice"]))) is not None
            }
            is_near_tie = (one["ids"][0],) in seen
        params = next(request.params for request in requests if request.request_id == one["request"])
        rows.append({**one, "is_near_tie": is_near_tie, "params": str(params)})
    return rows


def noisy_answers(
    requests: list[Request], model: Described, target: Target, sizes: Sizes
) -> list[dict[tuple[str, int], Choice]]:
    """Return the answers of plain torch whose logits have some noise, of several runs."""
    found: list[dict[tuple[str, int], Choice]] = []
    if not requests:
        return found
    generator = torch.Generator(target.device).manual_seed(SEED)
    with running(model, target, **sizes.settings | PLAIN) as engine:
        executor: Any = engine._parts.model.runner.executor  # type: ignore[attr-defined]
        forward = executor.forward

        def with_noise(batch: Any) -> torch.Tensor:
            logits = forward(batch)
            if not len(logits):
                return logits  # the step draws nothing, and torch warns of the deviation of no numbers
            noise = torch.empty_like(logits).normal_(std=NOISE, generator=generator)
            return logits + noise * logits.std(dim=-1, keepdim=True)

        executor.forward = with_noise
        for _ in range(NOISY_RUNS):
            choices: dict[tuple[str, int], list[TokenChunk]] = {}
            for event in events_of(engine, requests, {}, sizes.at_once, target.runtime):
                if isinstance(event, TokenChunk):
                    choices.setdefault((event.request_id, event.index), []).append(event)
            found.append({key: _whole(chunks) for key, chunks in choices.items()})
    return found


def unequal_greedy(
    fast: Answers, plain: Answers, requests: list[Request], model: Described, target: Target, sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """Yield where greedy answers differ whose logits nothing edits, and whether the tokens tie. In bfloat16, rounding
    moves the borders of other draws too often to tell."""
    options = EngineOptions(**sizes.settings, **PLAIN)
    runner = None
    for request in requests:
        key = (request.request_id, 0)
        if not is_plain_greedy(request.params) or key not in fast.choices or key not in plain.choices:
            continue
        a = fast.choices[key].token_ids
        b = plain.choices[key].token_ids
        place = first_difference(a, b)
        if place < min(len(a), len(b)):
            runner = runner or started(model, options, target).runner
            ids = [*request.prompts[0].token_ids, *a[:place]]  # type: ignore[union-attr]
            distance = tie_distance(runner, options.block_size, ids, a[place], b[place])
            yield {
                "request": request.request_id, "token": place, "distance": distance, "is_near_tie": distance < NEAR_TIE
            }  # fmt: skip
