"""Adapters on the executor of GPUs, in plain torch and in Triton's interpreter, equal merged weights."""

from typing import Any

import pytest
import torch

from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from tests.engine.model.runners import PROMPTS, decode
from tests.engine.model.steps import CPU, sequence_of
from tests.models.adapters import merged, random_adapter
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
    weights = CudaWeights(loaded.decoder, dtype=loaded.dtype, device=CPU)
    executor = CudaExecutor(weights, loaded.kv_shapes, num_blocks=32, block_size=16, kernels=Kernels())
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton has no wheels for this system")
        from oaiserve.plugins.cuda.executor.triton_adapters import TritonAdapters

        executor.kernels = executor.kernels._replace(adapters=TritonAdapters(shapes, 4, CPU))
    runner = ModelRunner(executor, CPU, 16)
    for number, adapter in adapters.items():
        runner.add_adapter(number, adapter)
    result = decode(runner, PROMPTS, [1, 0, 2, 1], 4)
    for prompt, number, answer in zip(PROMPTS, [1, 0, 2, 1], result, strict=True):
        reference = merged(model, adapters[number]) if number else model
        assert answer == generate(reference, [prompt], 4)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_adds_what_plain_torch_adds(dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.plugins.cuda.executor.triton_adapters import TritonAdapters

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
