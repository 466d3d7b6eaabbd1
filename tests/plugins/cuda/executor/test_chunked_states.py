"""Recurrences in chunks give the outputs and states of those token by token, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oaiserve.engine.executors.reference.mixers import recurrence
from oaiserve.engine.start.compare import difference
from oaiserve.plugins.cuda.executor.chunked_states import CHUNKED_FROM, LEAST_DECAY, chunked, in_chunks
from oaiserve.plugins.cuda.executor.kernels import Kernels
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import model_of
from tests.plugins.cuda.executor.test_executor import batch_with, on_cpu

HEADS = 4
KEY_DIM = 16
VALUE_DIM = 24


def inputs(num_tokens: int, *, key_heads: int = 2, has_rate: bool = True, seed: int = 0) -> dict[str, Any]:
    """Return a state and the numbers of tokens, as a gated delta net has them: keys of length 1, rates below 1."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(2, *sizes, generator=generator)

    key = torch.nn.functional.normalize(numbers(num_tokens, key_heads, KEY_DIM), dim=-1)
    return {
        "state": numbers(HEADS, KEY_DIM, VALUE_DIM),
        "decay": (-numbers(num_tokens, HEADS).abs() / 8).exp(),
        "key": key,
        "value": numbers(num_tokens, HEADS, VALUE_DIM),
        "query": numbers(num_tokens, key_heads, KEY_DIM) * KEY_DIM**-0.5,
        "rate": numbers(num_tokens, HEADS).sigmoid() if has_rate else None,
    }


def check(given: dict[str, Any], limit: float = 1e-5) -> None:
    expected_state = given["state"].clone()
    expected = recurrence(**{**given, "state": expected_state})
    state = given["state"].clone()
    out = chunked(**{**given, "state": state})
    assert out.dtype == torch.float32
    assert out.shape == expected.shape
    assert difference(out, expected) < limit
    assert difference(state, expected_state) < limit
    for token in (0, out.shape[1] // 2, -1):  # Small outputs count as much as large ones.
        assert difference(out[:, token], expected[:, token]) < 10 * limit


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("has_rate", [True, False])
def test_chunks_give_what_single_tokens_give(num_tokens: int, has_rate: bool) -> None:
    check(inputs(num_tokens, has_rate=has_rate))


def same_keys(given: dict[str, Any]) -> None:
    """Repeat one token: each subtracts all of what the ones before it have added."""
    given["key"] = given["key"][:, :1].expand_as(given["key"])
    given["rate"] = torch.full_like(given["rate"], 0.99)


def no_decay(given: dict[str, Any]) -> None:
    given["decay"] = torch.ones_like(given["decay"])


def strong_decay(given: dict[str, Any]) -> None:
    """Forget almost all at each third token, and all at some: products of decays are below all floats."""
    given["decay"][:, ::3] = 1e-12
    given["decay"][:, 50::64] = LEAST_DECAY / 1e6
    given["decay"][:, 7::64] = 0


def large_rates(given: dict[str, Any]) -> None:
    """Rates up to 2 reflect a state at a key, so that it may change its sign."""
    given["rate"] = 2 * given["rate"]


@pytest.mark.parametrize("change", [same_keys, no_decay, strong_decay, large_rates])
def test_extreme_numbers_stay_exact(change: Callable[[dict[str, Any]], None]) -> None:
    given = inputs(150)
    change(given)
    check(given, 3e-5)


def test_a_state_may_be_a_view_in_half_precision() -> None:
    """As Mamba 2 has it, whose states are transposed."""
    given = inputs(130, key_heads=1, has_rate=False)
    given["state"] = given["state"].bfloat16()
    views = [given["state"].mT.contiguous().mT for _ in range(2)]
    outs = [run(**{**given, "state": view}) for run, view in zip((recurrence, chunked), views, strict=True)]
    assert difference(outs[1], outs[0]) < 1e-5
    assert difference(views[1], views[0]) < 2**-8


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
@torch.inference_mode()
def test_long_prompts_of_a_model_are_computed_in_chunks_and_short_ones_are_not(family: str) -> None:
    model = model_of(config_of(family, max_position_embeddings=256))
    walked: list[int] = []

    def walk(*given: Any) -> torch.Tensor:
        walked.append(given[3].shape[1])
        return recurrence(*given)

    lengths = (CHUNKED_FROM - 1, CHUNKED_FROM + 5)
    logits = []
    for kernels in (Kernels(recurrence=in_chunks(walk)), Kernels()):
        executor = on_cpu(model.decoder, kernels=kernels)
        batches = (batch_with(model.spec, [([9 + at % 70 for at in range(length)], 0)]) for length in lengths)
        logits.append(torch.cat([executor.forward(batch) for batch in batches]))
    assert {*walked} == {CHUNKED_FROM - 1}
    assert difference(*logits) < 1e-4
