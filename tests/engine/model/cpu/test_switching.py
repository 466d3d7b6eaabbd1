"""From transformers' code to the native step, in the middle of everything: nobody can tell from the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.runner import Launched, ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Step
from tests.engine.model.cpu.small_models import BLOCK_SIZE, FAMILIES, load, make_engine, native

pytestmark = pytest.mark.compiler
NUM_BLOCKS = 14
PROMPTS = [[*range(20, 60), 4], [5, 9, 3, 17], list(range(20, 75)), [7] * 20, [90]]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, n=2)


class SwitchingRunner(ModelRunner):
    """Goes over to the native step with step `switch_at`; notes which steps copy blocks."""

    def __init__(self, loaded: LoadedModel, decoder: NativeDecoder | None, switch_at: int | None) -> None:
        super().__init__(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.num_steps = 0
        self.copying_steps: list[int] = []
        self._decoder, self._switch_at = decoder, switch_at

    def launch(self, step: Step) -> Launched:
        if self.num_steps == self._switch_at and self._decoder is not None:
            self.use(self._decoder)
        if step.copies:
            self.copying_steps.append(self.num_steps)
        self.num_steps += 1
        return super().launch(step)


def answers(loaded: LoadedModel, runner: ModelRunner) -> list[list[int]]:
    """Twice, so that the second round finds what the first one left in the prefix cache."""
    found = []
    with make_engine(loaded, runner, num_blocks=NUM_BLOCKS, max_running=6, max_step_tokens=23) as engine:
        for prompts in (PROMPTS, [prompt[:33] for prompt in PROMPTS]):
            params = replace(PARAMS, max_tokens=10 if prompts is PROMPTS else 20)
            found += [completion.token_ids for completion in engine.generate(prompts, params)]
        snapshot = engine.snapshot()
    assert snapshot.num_preemptions > 0
    assert snapshot.num_prefix_hits > 0
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_running_sequences_go_on_with_the_same_tokens(family: str) -> None:
    loaded = load(FAMILIES[family])
    eager = SwitchingRunner(loaded, None, None)
    expected = answers(loaded, eager)
    first_copy = eager.copying_steps[0]
    for switch_at in (0, 1, first_copy, first_copy + 1, eager.num_steps // 2, eager.num_steps * 3 // 4):
        decoder = native(loaded, num_blocks=NUM_BLOCKS)
        runner = SwitchingRunner(loaded, decoder, switch_at)
        assert answers(loaded, runner) == expected, f"switched before step {switch_at}"
        assert runner.num_steps > switch_at + 3
        assert decoder.durations_seconds()["attention"] > 0, "it has computed"
