"""Answers are those of transformers' code for small random models of each family, however they are packed."""

import pytest

from tests.engine.model.runners import IN_SMALL_BLOCKS, eager_runner, greedy_answers, make_engine
from tests.models import small_configs
from tests.models.decoders import FAMILIES, greedy, random_model
from tests.models.described import SmallModel, described

PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
NUM_TOKENS = 8


def run_all(loaded: SmallModel, *, overlap: bool) -> tuple[list[list[int]], int]:
    """Run all prompts in chunks of all sizes and few blocks, and return their answers and the number of preemptions.

    With overlap, each step is launched before the ids that the step before draws are known.
    """
    runner = eager_runner(loaded, num_blocks=13, block_size=4)
    runner.is_asynchronous = overlap
    sizes = {**IN_SMALL_BLOCKS, "max_running": len(PROMPTS), "max_step_tokens": 7}
    with make_engine(loaded, runner, 13, **sizes) as engine:
        return greedy_answers(engine, PROMPTS, NUM_TOKENS), engine.snapshot().num_preemptions


# With caches of keys and values, of latent vectors and shared by layers, and with states.
@pytest.mark.parametrize(
    "family", [*FAMILIES, "gpt_oss", "nemotron", "deepseek_v3", "gemma3n_text", *small_configs.STATE_FAMILIES]
)
def test_answers_are_those_of_transformers_however_they_are_packed(family: str) -> None:
    model = random_model(FAMILIES.get(family) or small_configs.config_of(family))
    loaded = described(model)
    runner = eager_runner(loaded, num_blocks=64, block_size=4)
    with make_engine(loaded, runner, 64, **IN_SMALL_BLOCKS, max_running=16, max_step_tokens=100) as engine:
        # Two choices of each, which copy blocks and states; the second time with a filled prefix cache.
        first, again = (greedy_answers(engine, PROMPTS, NUM_TOKENS, n=2) for _ in range(2))
        assert engine.snapshot().num_preemptions == 0
        assert engine.snapshot().num_prefix_hits > 0 or loaded.state_shapes  # only those of long prompts are kept
    expected = first[::2]
    assert greedy(model, PROMPTS, expected) == expected
    assert first == again == [ids for ids in expected for _ in range(2)]
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "the answers must be able to differ"
    for overlap in (False, True):
        answers, num_preemptions = run_all(loaded, overlap=overlap)
        assert answers == expected
        assert num_preemptions > 0, "no sequence was preempted"
