"""Answers are those of transformers' code for small random models of each family, however they are packed."""

import pytest

from tests.engine.model.runners import IN_SMALL_BLOCKS, eager_runner, greedy_answers, make_engine
from tests.models import small_configs
from tests.models.decoders import FAMILIES, greedy, random_model
from tests.models.described import SmallModel, described

PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
NUM_TOKENS = 8


def run_all(
    loaded: SmallModel, *, num_blocks: int, max_step_tokens: int, overlap: bool = False
) -> tuple[list[list[int]], int]:
    """Run all prompts at once, and return their answers and the number of preemptions.

    With overlap, each step is launched before the ids that the step before draws are known.
    """
    runner = eager_runner(loaded, num_blocks=num_blocks, block_size=4)
    runner.is_asynchronous = overlap
    sizes = {**IN_SMALL_BLOCKS, "max_running": len(PROMPTS), "max_step_tokens": max_step_tokens}
    with make_engine(loaded, runner, num_blocks, **sizes) as engine:
        return greedy_answers(engine, PROMPTS, NUM_TOKENS), engine.snapshot().num_preemptions


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron", *small_configs.STATE_FAMILIES])
def test_answers_are_those_of_transformers_however_they_are_packed(family: str) -> None:
    model = random_model(FAMILIES.get(family) or small_configs.config_of(family))
    loaded = described(model)
    expected, num_preemptions = run_all(loaded, num_blocks=64, max_step_tokens=64)  # whole prompts
    assert greedy(model, PROMPTS, expected) == expected
    assert num_preemptions == 0
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "the answers must be able to differ"
    for overlap in (False, True):  # chunks of all sizes
        few_blocks = run_all(loaded, num_blocks=13, max_step_tokens=7, overlap=overlap)
        assert few_blocks[0] == expected
        assert few_blocks[1] > 0, "no sequence was preempted"
