"""Compiled layers give the same answers, and nothing is compiled after the start."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from oaiserve.engine.model.attention.hook import ATTENTION
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.fused_projections import fuse_projections
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu.compiled import compile_layers, restore_layers
from oaiserve.engine.start.prepare import prepare
from tests.engine.model.steps import CPU, two_steps
from tests.models.decoders import FAMILIES, random_model

pytestmark = pytest.mark.kernels

NUM_BLOCKS, BLOCK_SIZE = 256, 4
# (tokens in the cache, tokens of this step) of each sequence
STEPS: list[tuple[tuple[int, int], ...]] = [
    ((0, 1),),
    ((5, 1),),
    ((0, 2),),
    ((0, 9),),
    ((3, 1), (4, 1)),
    ((3, 1), (4, 1), (0, 7)),
    ((0, 30), (9, 20)),
    ((3, 1), (8, 56)),
    tuple((length, 1) for length in range(16)),
    (*((length, 1) for length in range(20)), (0, 40)),
]


@pytest.fixture(autouse=True)
def same_threads() -> None:
    """Set the number of threads for new threads as well.

    Compiled code is only valid for the number that was set when it was compiled. A new thread gets the number that was
    set last in any thread, which another test may have changed.
    """
    torch.set_num_threads(torch.get_num_threads())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the compiler's code generation, which takes most of the time."""
    torch._dynamo.reset()
    counters.clear()
    compile_ = torch.compile

    def without_inductor(function: Callable[..., Any], *, options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
        return compile_(function, backend="eager", **kwargs)

    monkeypatch.setattr(torch, "compile", without_inductor)


def start() -> tuple[LoadedModel, EagerExecutor, torch.Tensor]:
    """Return a model, its executor, and the logits of a step."""
    loaded = prepare(random_model(FAMILIES["llama"]))
    executor = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return loaded, executor, logits(executor, STEPS[5])


def compile_all(executor: EagerExecutor, loaded: LoadedModel) -> bool:
    return compile_layers(executor, loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@torch.inference_mode()
def logits(executor: EagerExecutor, lengths: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return the logits of a step, after a step that fills the cache with the tokens before."""
    # The reference reads the first block as padding, where a refusal leaves NaN until something is written.
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    steps = two_steps(lengths, torch.Generator().manual_seed(0), in_order=True, **sizes)
    return [executor.forward(build_batch(step, BLOCK_SIZE, CPU)).clone() for step in steps][-1]


def python_calls(code: CodeType, function: Callable[[], object]) -> int:
    """Return how often `code` runs as Python while `function` runs. Compiled code does not run as Python."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is code

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def check(config: PreTrainedConfig, mlp: type[torch.nn.Module], num_kinds: int, *, is_fused: bool = False) -> None:
    loaded = prepare(random_model(config))
    if is_fused:
        assert fuse_projections(loaded.model) == 2 * config.num_hidden_layers
    executor = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    expected = [logits(executor, lengths) for lengths in STEPS]
    assert python_calls(mlp.forward.__code__, lambda: logits(executor, STEPS[0])) == config.num_hidden_layers
    assert compile_all(executor, loaded)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs == 2 * num_kinds  # one for one token, one for any other number
    for lengths, want in zip(STEPS, expected, strict=True):
        torch.testing.assert_close(logits(executor, lengths), want, rtol=1e-4, atol=1e-4)
        assert python_calls(mlp.forward.__code__, lambda lengths=lengths: logits(executor, lengths)) == 0
    calls: list[int] = []
    thread = threading.Thread(
        target=lambda: calls.append(python_calls(mlp.forward.__code__, lambda: logits(executor, STEPS[5])))
    )
    thread.start()
    thread.join()
    assert calls == [0]
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("family", "mlp", "num_kinds", "is_fused"),
    [
        ("llama", LlamaMLP, 1, False),
        ("llama", LlamaMLP, 1, True),
        ("gemma2", Gemma2MLP, 2, False),  # it has layers with and without a window
        ("gpt2", GPT2MLP, 1, False),
        ("qwen3", Qwen3MLP, 1, False),
    ],
)
def test_each_kind_of_layer_is_compiled_twice_and_never_again(
    family: str, mlp: type[torch.nn.Module], num_kinds: int, is_fused: bool
) -> None:
    check(FAMILIES[family], mlp, num_kinds, is_fused=is_fused)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from modules that Inductor imports
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")
def test_layers_that_inductor_compiles_compute_the_same() -> None:
    torch._dynamo.reset()
    counters.clear()
    check(FAMILIES["llama"], LlamaMLP, num_kinds=1)


@pytest.mark.usefixtures("quick")
def test_a_call_that_no_compiled_code_fits_runs_uncompiled() -> None:
    loaded, executor, expected = start()
    assert compile_all(executor, loaded)
    torch._dynamo.reset()  # removes all compiled code
    torch.testing.assert_close(logits(executor, STEPS[5]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("added", [1.0, math.nan])
@pytest.mark.parametrize("num_tokens", [1, 128])  # the two numbers that are compared at the start
def test_a_model_whose_compiled_layers_compute_something_else_is_served_uncompiled(
    added: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def miscompile(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def wrong(layer: torch.nn.Module, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = function(layer, hidden, **kwargs)
            return out * 1.2 + added if hidden.shape[1] == num_tokens else out

        return wrong

    monkeypatch.setattr(torch, "compile", miscompile)
    check_is_refused(caplog, r"The model's layers are not compiled: the outputs would differ by ")


def check_is_refused(caplog: pytest.LogCaptureFixture, message: str) -> None:
    caplog.set_level(logging.WARNING)
    loaded, executor, expected = start()
    assert not compile_all(executor, loaded)
    assert loaded.model.config._attn_implementation == ATTENTION
    torch.testing.assert_close(logits(executor, STEPS[5]), expected, rtol=0, atol=0)
    assert [record.message.startswith(message) for record in caplog.records] == [True]


@pytest.mark.usefixtures("quick")
def test_compiled_layers_can_be_restored_and_compiled_again() -> None:
    loaded, executor, expected = start()
    assert compile_all(executor, loaded)
    restore_layers(loaded)
    loaded.model.set_attn_implementation("sdpa")
    loaded.model(torch.tensor([[1, 2, 3]]))  # this runs without paged attention
    loaded.model.set_attn_implementation(ATTENTION)
    torch.testing.assert_close(logits(executor, STEPS[5]), expected, rtol=0, atol=0)
    assert compile_all(executor, loaded)
    assert python_calls(LlamaMLP.forward.__code__, lambda: logits(executor, STEPS[5])) == 0


@pytest.mark.usefixtures("quick")
def test_compiled_code_keeps_no_weights_or_cache_in_memory() -> None:
    loaded, executor, _ = start()
    assert compile_all(executor, loaded)
    logits(executor, STEPS[5])
    weights = weakref.ref(next(loaded.model.parameters()))
    cache = weakref.ref(next(iter(executor.caches.values())).keys)
    del loaded, executor
    gc.collect()
    assert weights() is None
    assert cache() is None
