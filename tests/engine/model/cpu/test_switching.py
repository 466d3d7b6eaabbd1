"""From transformers' code to the native step, or to native attention, in the middle of everything: nobody can tell from
the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from oaiserve.engine.model.attention import reference
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.start import native_attention
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.runner import Launched, ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.step import Step
from tests.engine.model.cpu.small_models import BLOCK_SIZE, FAMILIES, MIXTURES, load, make_engine, native

pytestmark = pytest.mark.compiler
NUM_BLOCKS = 14
PROMPTS = [[*range(20, 60), 4], [5, 9, 3, 17], list(range(20, 75)), [7] * 20, [90]]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, n=2)


class SwitchingRunner(ModelRunner):
    """Goes over to native code with step `switch_at`; notes which steps copy blocks."""

    def __init__(
        self, loaded: LoadedModel, native: NativeDecoder | NativeAttention | None, switch_at: int | None
    ) -> None:
        super().__init__(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.num_steps = 0
        self.copying_steps: list[int] = []
        self._native, self._switch_at = native, switch_at

    def launch(self, step: Step) -> Launched:
        if self.num_steps == self._switch_at and self._native is not None:
            self.use(self._native)
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


def switches(eager: SwitchingRunner) -> list[int]:
    """Steps to switch before, in a run like this one."""
    first_copy = eager.copying_steps[0]
    return [0, 1, first_copy, first_copy + 1, eager.num_steps // 2, eager.num_steps * 3 // 4]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_running_sequences_go_on_with_the_same_tokens(family: str) -> None:
    loaded = load(FAMILIES[family])
    eager = SwitchingRunner(loaded, None, None)
    expected = answers(loaded, eager)
    for switch_at in switches(eager):
        decoder = native(loaded, num_blocks=NUM_BLOCKS)
        runner = SwitchingRunner(loaded, decoder, switch_at)
        assert answers(loaded, runner) == expected, f"switched before step {switch_at}"
        assert runner.num_steps > switch_at + 3
        assert decoder.durations_seconds()["attention"] > 0, "it has computed"


@pytest.mark.parametrize("family", MIXTURES)
def test_they_go_on_with_native_attention(family: str) -> None:
    loaded = load(MIXTURES[family])
    eager = SwitchingRunner(loaded, None, None)
    expected = answers(loaded, eager)
    num_reference_calls = 0

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_reference_calls
        num_reference_calls += 1
        return attend(*args, **kwargs)

    attend = reference.attend
    for switch_at in switches(eager):
        native = native_attention(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=1)
        runner = SwitchingRunner(loaded, native, switch_at)
        num_reference_calls = 0
        runner._executor.backend = counting  # type: ignore[attr-defined]
        assert answers(loaded, runner) == expected, f"switched before step {switch_at}"
        assert runner.num_steps > switch_at + 3
        assert num_reference_calls == switch_at * len(loaded.kv_shapes), "not one more from then on"
