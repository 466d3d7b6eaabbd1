"""Adapters on the executor of GPUs, in plain torch and in Triton's interpreter, equal merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.executors.cuda.kernels import PlainAttention
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import FAMILIES as NATIVE_FAMILIES
from tests.engine.model.runners import PROMPTS, decode, gpu_executor
from tests.engine.model.steps import CPU, sequence_of
from tests.engine.remembered import save
from tests.models.adapters import adaptable, merged, random_adapter, write_adapter
from tests.models.decoders import FAMILIES, generate, random_model
from tests.models.described import described


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_answers_with_adapters_are_those_of_merged_weights(family: str, kernels: str) -> None:
    model = random_model(FAMILIES[family])
    loaded = described(model)
    shapes = loaded.decoder.adaptable()
    some = {name: shape for index, (name, shape) in enumerate(shapes.items()) if index % 2}
    adapters = {1: random_adapter(shapes, 1), 2: random_adapter(some, 2, rank=20)}
    executor = gpu_executor(loaded, PlainAttention, num_blocks=32, block_size=16)
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton has no wheels for this system")
        from oaiserve.engine.executors.cuda.triton_adapters import TritonAdapters

        executor.kernels = executor.kernels._replace(adapters=TritonAdapters(shapes, 4, CPU))
    runner = ModelRunner(executor, CPU, 16)
    for number, adapter in adapters.items():
        runner.add_adapter(number, adapter)
    result = decode(runner, PROMPTS, [1, 0, 2, 1], 4)
    for prompt, number, answer in zip(PROMPTS, [1, 0, 2, 1], result, strict=True):
        reference = merged(model, adapters[number]) if number else model
        assert answer == generate(reference, [prompt], 4)[0]


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_linear_layers_are_adaptable_but_not_experts_and_the_output_head(family: str) -> None:
    loaded = described(random_model(NATIVE_FAMILIES[family]))
    if not loaded.state_shapes:  # adapters are refused for others
        assert loaded.decoder.adaptable() == adaptable(loaded.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_adds_what_plain_torch_adds(dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.executors.cuda.triton_adapters import TritonAdapters

    shapes = {"wide": (300, 130), "narrow": (48, 200)}
    first = random_adapter(shapes, 1, rank=33, dtype=dtype)
    second = random_adapter(shapes, 2, rank=5, dtype=dtype)
    third = random_adapter({"wide": shapes["wide"]}, 3, rank=1, dtype=dtype)
    lengths = (1, 1, 20, 3, 18)
    chunks = [Chunk(sequence_of([1] * length, [0] * length), 0, length) for length in lengths]
    batch = build_batch(Step(chunks), 16, CPU)
    batch.adapters = [first, None, second, third, first]
    generator = torch.Generator().manual_seed(4)
    add_in_torch = Products(batch).add_to
    add_in_triton = TritonAdapters(shapes, 3, CPU).of_batch(batch)
    for name, (rows, columns) in shapes.items():
        x = torch.randn(43, columns, generator=generator).to(dtype)
        products = torch.randn(43, rows, generator=generator).to(dtype)
        expected = products.clone()
        actual = products.clone()
        add_in_torch(name, x, expected)
        add_in_triton(name, x, actual)
        tolerance: dict[str, Any] = (
            {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.06}
        )
        torch.testing.assert_close(actual, expected, **tolerance)
        assert torch.equal(actual[1], products[1])  # the row without an adapter
        if name == "narrow":
            assert torch.equal(actual[22:25], products[22:25])  # those whose adapter has nothing for this layer


@pytest.mark.compiler
def test_an_adapter_for_another_model_stops_the_start_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oaiserve.engine.start.ways.described.cpu_sizes", None)
    save(random_model(NATIVE_FAMILIES["llama"]), tmp_path / "model")
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (7, 8)})
    message = (
        f"--lora sql={tmp_path} cannot be used: '{tmp_path}/adapter_model.safetensors': its tensor .* has the shape"
    )
    with pytest.raises(StartupError, match=message):
        SimulatedEngine.from_pretrained(tmp_path / "model", device="cpu", lora=(f"sql={tmp_path}",))
