"""Layers that keep a state: the native step computes what transformers' code does, from the same states to the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.cpu.description import NotKnown
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.cpu.small_models import DELTA, STATE_FAMILIES, config, load, native
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, sequence_of

pytestmark = pytest.mark.compiler
# Parts (place of the state, start, end) of each step: new sequences, several tokens, single ones, apart and in order.
STEPS = [
    [(5, 0, 1), (0, 0, 7), (3, 0, 20)],
    [(0, 7, 8), (5, 1, 2), (3, 20, 23)],
    [(3, 23, 24), (0, 8, 40), (5, 2, 4)],
    [(0, 40, 41), (3, 24, 25), (5, 4, 5)],
]


def held(place: int, vocab_size: int) -> Sequence:
    ids = [(7 * i + 13 * place + 3) % vocab_size for i in range(48)]
    return sequence_of(ids, range(3 * place, 3 * place + 3), name=str(place), state=place)


@torch.inference_mode()
def computed(executor: Executor, loaded: LoadedModel, states: States, parts: list[tuple[int, int, int]]) -> Tensor:
    chunks = [Chunk(held(place, loaded.vocab_size), start, end - start) for place, start, end in parts]
    batch = build_batch(Step(chunks), BLOCK_SIZE, loaded.device)
    batch.states = states.of_step([StateChunk(place, start, end - start) for place, start, end in parts])
    return executor.forward(batch).clone()


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_logits_and_states_are_those_of_transformers_code(family: str) -> None:
    loaded = load(STATE_FAMILIES[family])
    eager, step = EagerExecutor.with_cache(loaded, num_blocks=20, block_size=BLOCK_SIZE), native(loaded, num_threads=2)
    own, other = states_of(loaded), states_of(loaded)
    for parts in STEPS:
        found, expected = computed(step, loaded, own, parts), computed(eager, loaded, other, parts)
        assert (found - expected).norm() < 1e-4 * expected.norm()
        for state, reference in zip(own._tensors, other._tensors, strict=True):
            torch.testing.assert_close(state, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max()))


NOT_KNOWN = {
    "small heads": ({"linear_key_head_dim": 8}, "its states have 8 numbers in a row, which is no multiple of 16"),
    "long convolutions": ({"linear_conv_kernel_dim": 9}, "its convolutions look at 9 tokens, and not at 2 to 8"),
}


@pytest.mark.parametrize("case", NOT_KNOWN)
def test_a_state_that_native_code_does_not_compute_is_refused(case: str) -> None:
    values, reason = NOT_KNOWN[case]
    with pytest.raises(NotKnown, match=reason):
        native(load(config("qwen3_5_text", **DELTA | values)))
