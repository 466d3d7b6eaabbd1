"""A switch from transformers' code to native code between any two steps leaves the answers the same."""

from __future__ import annotations

import pytest

from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.runner import Launched, ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.native import _hand_over, native_attention
from oaiserve.engine.step import Step
from tests.engine.model.cpu.small_models import FAMILIES, WITHOUT_STEP, load, native
from tests.engine.model.runners import greedy_answers, make_engine
from tests.engine.model.steps import BLOCK_SIZE

pytestmark = pytest.mark.compiler
NUM_BLOCKS = 14
PROMPTS = [[*range(20, 60), 4], [5, 9, 3, 17], list(range(20, 75)), [7] * 20, [90]]


class SwitchingRunner(ModelRunner):
    """Switches to native code before step `switch_at`, and records which steps copy blocks."""

    def __init__(
        self,
        loaded: LoadedModel,
        native: NativeDecoder | NativeAttention | None = None,
        switch_at: int | None = None,
    ) -> None:
        self._loaded = loaded
        self._eager = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        super().__init__(self._eager, loaded.device, BLOCK_SIZE)
        self.num_steps = 0
        self.copying_steps: list[int] = []
        self._native, self._switch_at = native, switch_at

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._switch_in_time()
        self.copying_steps.append(self.num_steps)
        super().copy_blocks(copies)

    def launch(self, step: Step) -> Launched:
        self._switch_in_time()
        self.num_steps += 1
        return super().launch(step)

    def _switch_in_time(self) -> None:
        if self.num_steps == self._switch_at and self._native is not None:
            native, self._native = self._native, None
            is_attention = isinstance(native, NativeAttention)
            later = EagerExecutor(self._loaded, native.caches, native.prepare) if is_attention else native
            self.replace(later, _hand_over(self._eager, native))


def answers(loaded: LoadedModel, runner: ModelRunner) -> list[list[int]]:
    """Return the answers of two rounds. The second round finds blocks of the first in the prefix cache."""
    found = []
    with make_engine(loaded, runner, num_blocks=NUM_BLOCKS, max_running=6, max_step_tokens=23) as engine:
        for prompts in (PROMPTS, [prompt[:33] for prompt in PROMPTS]):
            found += greedy_answers(engine, prompts, 10 if prompts is PROMPTS else 20, n=2)
        snapshot = engine.snapshot()
    assert snapshot.num_preemptions > 0
    assert snapshot.num_prefix_hits > 0
    return found


def switches(eager: SwitchingRunner) -> list[int]:
    """Return the steps before which to switch, in a run with the same steps as this one."""
    first_copy = eager.copying_steps[0]
    return [0, 1, first_copy, first_copy + 1, eager.num_steps // 2, eager.num_steps * 3 // 4]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "without a step"])
def test_answers_are_the_same_with_a_switch_to_the_native_step_or_attention(family: str) -> None:
    loaded = load(FAMILIES.get(family, WITHOUT_STEP))
    eager = SwitchingRunner(loaded)
    expected = answers(loaded, eager)
    for switch_at in switches(eager):
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 1}
        code = native(loaded, num_blocks=NUM_BLOCKS) if family in FAMILIES else native_attention(loaded, **sizes)
        runner = SwitchingRunner(loaded, code, switch_at)
        assert answers(loaded, runner) == expected, f"switched before step {switch_at}"
        assert runner.num_steps > switch_at + 3
        assert family not in FAMILIES or code.durations_seconds()["attention"] > 0, "the native step has run"


def test_nothing_that_was_cached_before_a_switch_is_found_after_it() -> None:
    loaded = load(FAMILIES["llama"])
    eager = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    runner = ModelRunner(eager, loaded.device, BLOCK_SIZE)
    decoder = native(loaded, num_blocks=NUM_BLOCKS)
    hits = []
    with make_engine(loaded, runner, num_blocks=NUM_BLOCKS) as engine:
        for request in range(4):
            if request == 2:
                runner.replace(decoder, _hand_over(eager, decoder))
            greedy_answers(engine, [PROMPTS[2]], 20, n=2)
            hits.append(engine.snapshot().num_prefix_hits)
    in_cache = len(PROMPTS[2]) // BLOCK_SIZE * BLOCK_SIZE
    assert hits == [0, in_cache, in_cache, 2 * in_cache]
