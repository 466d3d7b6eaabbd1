"""With `--exact`, the logits of a token are the same bits in any step on a GPU: in the interpreter of Triton."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.fused_layers import FusedExecutor, FusedLayers
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.gpu.layers import described, exactness_problem
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.steps import sequence_of
from tests.models.decoders import FAMILIES, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from triton.runtime import interpreter

from oaiserve.engine.model.attention.triton import ExactAttention, TritonAttention
from oaiserve.engine.model.gpu import triton_layers
from oaiserve.engine.model.gpu.triton_exact import TILE_ROWS, exact_product

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 8, 60, 12
SIZES = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}


@pytest.fixture(autouse=True, scope="module")
def each_row_alike() -> Iterator[None]:
    """Let the interpreter multiply each row of a tile alike, as devices do: BLAS on AVX2 rounds it by its place."""

    def create_dot(_: object, a: Any, b: Any, acc: Any, *options: object) -> Any:
        product = np.einsum("...ij,...jk->...ik", a.data, b.data, dtype=acc.data.dtype)
        return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


def executor(loaded: LoadedModel) -> FusedExecutor:
    layers = FusedLayers(loaded, described(loaded, BLOCK_SIZE), triton_layers, exact_product)
    return FusedExecutor(layers, EagerExecutor.with_cache(loaded, **SIZES).caches, ExactAttention)


@pytest.fixture(scope="module")
def exact() -> FusedExecutor:
    return executor(prepare(random_model(FAMILIES["qwen3"])))


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 150), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.sampled_from(["float32", "bfloat16"])
)
def test_a_product_is_that_of_torch_and_the_same_bits_for_each_row_in_any_number_of_rows(
    rows: int, n: int, columns: int, has_bias: bool, name: str
) -> None:
    torch.manual_seed(rows)
    dtype = getattr(torch, name)
    x, weight = torch.randn(rows, columns, dtype=dtype), torch.randn(n, columns, dtype=dtype)
    bias = torch.randn(n, dtype=dtype) if has_bias else None
    found = exact_product(x, weight, bias)
    want = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(found.float(), want, rtol=1e-2 if name == "bfloat16" else 1e-4, atol=1e-2)
    alone = torch.cat([exact_product(x[row : row + 1], weight, bias) for row in range(0, rows, TILE_ROWS // 3)])
    assert torch.equal(alone, found[:: TILE_ROWS // 3])
    transposed = exact_product(x, weight.t().contiguous().t(), bias)  # as the weights of GPT-2 are
    assert torch.equal(transposed, found)


def cut(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """Cut a sequence into chunks at random places, the last one of one token or several."""
    places = sorted(rng.sample(range(1, length), min(length - 1, rng.randrange(4))))
    return list(zip([0, *places], [*places, length], strict=True))


@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_logits_of_a_token_are_the_same_bits_in_any_step(exact: FusedExecutor, seed: int) -> None:
    """Sequences are cut at random places, and computed beside each other in random steps, or each at once and alone."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 7, 16, 17, 23]) for _ in range(4)]
    sequences = [
        sequence_of([rng.randrange(97) for _ in range(length)], list(range(WIDTH * i, WIDTH * (i + 1))), name=f"r{i}")
        for i, length in enumerate(lengths)
    ]
    whole = [
        exact.forward(build_batch(Step([Chunk(one, 0, len(one.token_ids))]), BLOCK_SIZE, CPU)).clone()[0]
        for one in sequences
    ]
    left = {one: cut(rng, len(one.token_ids)) for one in sequences}
    while any(left.values()):
        chosen = [one for one in sequences if left[one] and rng.random() < 0.7]
        chunks = [Chunk(one, start, end - start) for one in chosen for start, end in [left[one].pop(0)]]
        if not chunks:
            continue
        step = Step(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1))
        logits = exact.forward(build_batch(step, BLOCK_SIZE, CPU))
        for row, chunk in enumerate(step.chunks):
            if chunk.end == len(chunk.sequence.token_ids):
                assert torch.equal(logits[row], whole[sequences.index(chunk.sequence)])


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
@torch.inference_mode()
def test_exact_layers_compute_what_transformers_code_does(family: str) -> None:
    loaded = prepare(random_model(FAMILIES[family]))
    exact = executor(loaded)
    assert exact.is_exact
    step = Step([Chunk(sequence_of(list(range(3, 40)), list(range(5))), 0, 37)])
    batch = build_batch(step, BLOCK_SIZE, CPU)
    eager = EagerExecutor.with_cache(loaded, **SIZES, backend=ReferenceAttention)
    torch.testing.assert_close(exact.forward(batch), eager.forward(batch), rtol=1e-4, atol=1e-4)
    if family == "gpt2":  # which takes the interpreter the least time
        assert exactness_problem(exact, loaded, **SIZES) is None


@torch.inference_mode()
def test_the_start_finds_attention_whose_sums_depend_on_the_step() -> None:
    """Decodes by their own kernel round otherwise than the same tokens in a prompt."""
    loaded = prepare(random_model(FAMILIES["llama"]))
    exact = executor(loaded)
    exact._backend = TritonAttention
    assert "has other logits" in str(exactness_problem(exact, loaded, **SIZES))
