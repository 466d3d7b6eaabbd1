"""Answers are those of transformers' code for small random models of each family, however they are packed."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from transformers import PreTrainedConfig

from oaiserve.engine.blocks import BlockPool, StatePool
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Request, SamplingParams, TokenPrompt
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.prepare import prepare
from tests.engine.answers import collect
from tests.engine.model.runners import (
    IN_SMALL_BLOCKS,
    eager_runner,
    greedy_answers,
    make_engine,
)
from tests.models import small_configs
from tests.models.decoders import FAMILIES, FOREIGN_FAMILIES, foreign_config, generate, greedy, random_model

PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
NUM_TOKENS = 8


def run_all(
    loaded: LoadedModel, *, num_blocks: int, max_step_tokens: int, overlap: bool = False
) -> tuple[list[list[int]], int]:
    """Run all prompts at once, and return their answers and the number of preemptions.

    With overlap, each step is launched before the ids that the step before draws are known.
    """
    states = StatePool(8, shortest_kept=4) if loaded.state_shapes else None
    scheduler = Scheduler(BlockPool(num_blocks, 4), Limits(5, max_step_tokens), states=states)
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=4)
    params = SamplingParams(temperature=0.0)
    sequences = [
        Sequence(str(i), 0, prompt, params, max_len=len(prompt) + NUM_TOKENS) for i, prompt in enumerate(PROMPTS)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    under_way = None
    while (step := scheduler.schedule()) is not None or under_way is not None:
        launched = None
        if step is not None:
            launched = runner.launch(step)
            scheduler.advance(step)
        ended, under_way = (under_way, launched) if overlap else (launched, None)
        if ended is not None:
            for chunk, result in zip(ended.step.chunks, runner.collect(ended).chunks, strict=True):
                scheduler.commit(chunk, result.token_ids)
        scheduler.check_integrity()
    return [sequence.generated_ids for sequence in sequences], scheduler.num_preemptions


def config_of(family: str) -> PreTrainedConfig:
    if family in FAMILIES:
        return FAMILIES[family]
    return foreign_config(family) if family in FOREIGN_FAMILIES else small_configs.config_of(family)


@pytest.mark.parametrize("family", [*FAMILIES, *FOREIGN_FAMILIES, *small_configs.STATE_FAMILIES])
def test_answers_are_those_of_transformers_however_they_are_packed(family: str) -> None:
    model = random_model(config_of(family))
    loaded = prepare(copy.deepcopy(model))
    expected, num_preemptions = run_all(loaded, num_blocks=64, max_step_tokens=64)  # whole prompts
    assert greedy(model, PROMPTS, expected) == expected
    assert num_preemptions == 0
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "the answers must be able to differ"
    for overlap in (False, True):  # chunks of all sizes
        few_blocks = run_all(loaded, num_blocks=13, max_step_tokens=7, overlap=overlap)
        assert few_blocks[0] == expected
        assert few_blocks[1] > 0, "no sequence was preempted"


def eager_engine(loaded: LoadedModel, num_blocks: int, **options: Any) -> Engine:
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=4)
    return make_engine(loaded, runner, num_blocks, **IN_SMALL_BLOCKS, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "falcon_h1"])
def test_answers_are_the_same_if_blocks_are_shared_or_copied(family: str) -> None:
    """Repeated prompts take blocks from the prefix cache, and several choices of a prompt copy blocks and states."""
    model = random_model(config_of(family))
    prompts = [*PROMPTS, [*PROMPTS[1], 3, 4], PROMPTS[1][:20]]
    expected = generate(model, prompts, NUM_TOKENS)
    with eager_engine(prepare(model), 64, max_running=8, max_step_tokens=16) as engine:
        for _ in range(2):
            assert greedy_answers(engine, prompts, NUM_TOKENS, n=2) == [ids for ids in expected for _ in range(2)]
        assert engine.snapshot().blocks_cached > 0


@pytest.mark.parametrize(("family", "num_requests"), [("llama", 100), ("lfm2", 40)])
def test_requests_have_the_same_answers_under_constant_preemption(family: str, num_requests: int) -> None:
    """Half of the requests draw at random with a seed: a draw must not depend on when or how often it is computed."""
    rng, loaded = random.Random(3), prepare(random_model(config_of(family)))
    requests = []
    for i in range(num_requests):
        prompt = [*range(rng.randrange(3) * 5), *(rng.randrange(97) for _ in range(rng.randint(1, 16)))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 16), temperature=i % 2, seed=i, n=rng.choice([1, 1, 2]), ignore_eos=True
        )
        requests.append(Request(f"r{i}", (TokenPrompt(prompt),), params, stream_interval=0))
    answers = []
    for num_blocks in (1000, 14):
        with eager_engine(loaded, num_blocks, max_running=12, max_step_tokens=24) as engine:
            answers.append(collect(engine, requests))
    assert answers[1].num_preemptions > num_requests / 2
    answers[1].check(answers[0])
