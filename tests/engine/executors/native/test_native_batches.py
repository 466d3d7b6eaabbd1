"""The native step computes the logits of the reference in steps of all shapes, whatever its cache holds."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.executors.native.small_models import (
    EMULATED_AMX,
    compiled_for,
    config,
    load,
    make_model,
    native,
    with_nan,
)
from tests.engine.model.runners import reference_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS, Shape, batch_of_prompt, sequence_of, shapes, two_steps

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
LONG = {"max_position_embeddings": 1024, "num_hidden_layers": 2}
CONFIGS = {
    "grouped": config("llama", **LONG, num_attention_heads=4, num_key_value_heads=1, head_dim=48),
    "alone": config("llama", **LONG, num_key_value_heads=4, head_dim=80, intermediate_size=144),
    "window": config("mistral", **LONG, sliding_window=37),
    "capped": config("gemma2", **LONG, sliding_window=70, attn_logit_softcapping=5.0),
    "wide": config(  # a layer with heads of 512, whose values are its keys
        "gemma4_text",
        **LONG,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=70,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
}


def test_nan_in_a_sequence_affects_no_other_and_not_the_next_owner_of_its_blocks() -> None:
    loaded = load(config("llama", num_hidden_layers=2))
    model = make_model(config("llama", num_hidden_layers=2))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[5] = math.nan
    decoder = native(loaded, num_blocks=8)

    def last_logits(*sequences: tuple[list[int], int, list[int]]) -> list[torch.Tensor]:
        """Return the logits after each sequence, given by its token ids, the number in the cache, and its blocks."""
        step = Step()
        for ids, num_computed, blocks in sequences:
            step.chunks.append(Chunk(sequence_of(ids, blocks), num_computed, len(ids) - num_computed))
        with torch.inference_mode():
            return list(decoder.forward(build_batch(step, BLOCK_SIZE, loaded.device)).clone())

    def check(logits: torch.Tensor, ids: list[int]) -> None:
        with torch.inference_mode():
            torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0, -1], rtol=1e-3, atol=1e-3)

    sane = list(range(30, 57))
    other = list(range(60, 78))
    broken, first = last_logits(([5] * 48, 0, [0, 1, 2]), (sane, 0, [3, 4]))
    assert broken.isnan().all()
    check(first, sane)
    second, third = last_logits(([*sane, 9], len(sane), [3, 4]), (other, 0, [1, 0]))
    check(second, [*sane, 9])
    check(third, other)


class Both(NamedTuple):
    reference: ReferenceExecutor
    natives: list[NativeDecoder]  # with 1, 2 and 3 threads


# With AVX2 and SSE, vectors have other widths, for which there are other code paths.
OTHERS = [("grouped", "x86-64-v3"), ("capped", "x86-64-v3"), ("wide", "x86-64-v3"), ("alone", "x86-64-v2")]


@pytest.fixture(scope="module", params=[*((name, "native") for name in CONFIGS), *OTHERS], ids="-".join)
def both(request: pytest.FixtureRequest) -> Both:
    name, instructions = request.param
    loaded = load(CONFIGS[name])
    with compiled_for(instructions):
        natives = [with_nan(native(loaded, num_blocks=NUM_BLOCKS, num_threads=threads)) for threads in (1, 2, 3)]
    return Both(reference_of(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), natives)


@pytest.mark.parametrize("name", ["grouped", "wide"])
@pytest.mark.parametrize("cpu", ["x86-64-v3", EMULATED_AMX])
def test_bfloat16_logits_of_another_cpus_code_are_close(cpu: str, name: str) -> None:
    loaded = load(CONFIGS[name], dtype=torch.bfloat16)
    results = []
    for instructions in ("native", cpu):
        with compiled_for(instructions), torch.inference_mode():
            decoder = native(loaded, num_blocks=8)
            results += [decoder.forward(batch).clone() for batch in (batch_of_prompt(89), batch_of_prompt(90, 89))]
    for own, other in zip(results[:2], results[2:], strict=True):
        assert (own - other).norm() < 0.01 * own.norm()


@given(shape=shapes(330, 300), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12)
@example(shape=[(0, 1)], seed=0)
@example(shape=[(15, 1), (16, 1), (17, 1), (255, 1), (256, 1)], seed=1)
@example(shape=[(600, 1), (0, 330), (255, 2), (3, 128)], seed=2)
def test_logits_equal_those_of_the_reference(both: Both, shape: Shape, seed: int) -> None:
    steps = two_steps(shape, torch.Generator().manual_seed(seed), wants_prompt_logprobs=True)
    results = []
    with torch.inference_mode():
        for executor in (both.reference, *both.natives):
            for part in steps:
                logits = executor.forward(build_batch(part, BLOCK_SIZE, CPU))
            results.append(logits.clone())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-3)
