"""Answers are those of transformers' code for small random models of each family, however they are packed."""

import copy

import pytest
from transformers import PreTrainedConfig

from oaiserve.engine.blocks import BlockPool, StatePool
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.prepare import prepare
from tests.engine.model.runners import (
    eager_runner,
)
from tests.models import small_configs
from tests.models.decoders import FAMILIES, FOREIGN_FAMILIES, foreign_config, greedy, random_model

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
