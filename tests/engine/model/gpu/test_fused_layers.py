"""Layers that run by their description compute what transformers' code does, in few launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from oaiserve.engine.decoder.description import Norm, NotKnown
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.fused_layers import FusedExecutor, FusedLayers
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.start.gpu.layers import described
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.engine.model.cpu.small_models import FAMILIES as KNOWN
from tests.engine.model.cpu.small_models import STATE_FAMILIES
from tests.engine.model.operations import NO_LAUNCH, Operations
from tests.models.decoders import FAMILIES, random_model

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.attention import triton as triton_attention
from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.gpu import triton_layers

# exp of a large number is infinity, and the activation is the number itself, which is right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]

BLOCK_SIZE, NUM_BLOCKS = 16, 24
CPU = torch.device("cpu")
LENGTHS = [9, 40, 17, 23]
FEW = [3, 17]  # for Triton's interpreter


def steps(loaded: LoadedModel, lengths: list[int]) -> list[Batch]:
    """Return batches of prompts, of their decodes, and of a decode beside a part of a prompt."""
    prompts, decodes = prompts_and_decodes(lengths, loaded.vocab_size, BLOCK_SIZE)
    mixed = Step([decodes.chunks[0], Chunk(decodes.chunks[-1].sequence, 14, 3)])
    return [build_batch(step, BLOCK_SIZE, CPU) for step in (prompts, decodes, mixed)]


def fused(loaded: LoadedModel, backend: Backend, operations: Any) -> FusedExecutor:
    layers = FusedLayers(loaded, described(loaded, BLOCK_SIZE), operations)
    caches = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE).caches
    return FusedExecutor(layers, caches, backend)


@torch.inference_mode()
def check(config: PreTrainedConfig, backend: Backend, operations: Any, lengths: list[int]) -> None:
    loaded = prepare(random_model(config))
    eager = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    expected = [eager.forward(batch).clone() for batch in steps(loaded, lengths)]
    executor = fused(loaded, backend, operations)
    for batch, want in zip(steps(loaded, lengths), expected, strict=True):
        torch.testing.assert_close(executor.forward(batch), want, rtol=1e-4, atol=1e-4)


# They have a norm behind their embedding, inputs of layers, queries that are scaled by their positions, or states.
NOT_KNOWN = ["gemma4_text", "ministral3", *STATE_FAMILIES]
DENSE = [
    name
    for name, config in KNOWN.items()
    if not {"num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"} & {*vars(config)}
    and name not in NOT_KNOWN
]


@pytest.mark.parametrize("family", [*NOT_KNOWN, "granitemoeshared"])  # the last has experts beside an MLP
def test_a_part_without_an_operation_is_refused(family: str) -> None:
    loaded = prepare(random_model(KNOWN[family]))
    with pytest.raises(NotKnown, match="experts beside an MLP" if family == "granitemoeshared" else None):
        FusedLayers(loaded, described(loaded, BLOCK_SIZE), layer_operations)


# Each mixture has attention and norms of its own around the experts; the last has an MLP in its first layer.
@pytest.mark.parametrize("family", [*DENSE, "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe"])
def test_logits_are_those_of_transformers_code(family: str) -> None:
    check(KNOWN[family], ReferenceAttention, layer_operations, LENGTHS)


# Queries and keys that are normed and rotated; an embedding that is scaled, and norms behind attention; neighbours
# rotated, and attention beside the MLP; biases, and positions that are added.
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "cohere", "gpt2"])
def test_logits_of_the_kernels_are_those_of_transformers_code(family: str) -> None:
    check(KNOWN[family], TritonAttention, triton_layers, FEW)


# -- how many launches these are ---------------------------------------------------------------------------------------


class Kernel:
    """Stands for a kernel of ours: counts its launches, and computes nothing."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        self._counts[self._name] += 1


@torch.inference_mode()
def launches(config: PreTrainedConfig, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The launches of a decode step of a model with so many layers: operations of torch, and kernels of ours."""
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": num_layers, "layer_types": None})
    loaded = prepare(random_model(config))
    executor = fused(loaded, TritonAttention, triton_layers)
    batch = steps(loaded, LENGTHS)[1]
    counts = Counter[str]()
    for module in (triton_attention, triton_layers):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel(name, counts))
    with Operations() as operations:
        executor.forward(batch)
    return counts + Counter(name for name in operations.names if name not in NO_LAUNCH)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_of_a_decode_is_eight_launches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = (launches(FAMILIES[family], number, monkeypatch) for number in (1, 3))
    more = three - one
    assert sum(more.values()) == 2 * 8, more
    assert more["decode_kernel"] == 2
    assert more["add_and_norm_kernel"] == 4
    assert more["activate_kernel"] == 2
    rest = sum(one.values()) - 8
    assert rest <= 5, one  # the embedding, its norm, the plan of attention, the rows that draw, and the head


# -- the parts --------------------------------------------------------------------------------------------------------

NORMS = {
    "none": None,
    "rms": Norm(torch.linspace(0.5, 2, 50), None, 1e-5, subtracts_mean=False),
    "mean": Norm(torch.linspace(0.5, 2, 50), torch.linspace(-1, 1, 50), 1e-5, subtracts_mean=True),
}


@pytest.mark.parametrize("out_norm", NORMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("num_added", [0, 1, 2])
def test_sums_and_norms_are_those_in_plain_torch(num_added: int, norm: str, out_norm: str) -> None:
    hidden, *added = torch.randn(1 + num_added, 3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = tuple(added), NORMS[out_norm], NORMS[norm], 0.5
    want = layer_operations.add_and_norm(hidden.clone(), *arguments)
    got = triton_layers.add_and_norm(hidden.clone(), *arguments)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", layer_operations.ACTIVATIONS)
def test_activations_are_those_in_plain_torch(activation: str, is_gated: bool) -> None:
    products = torch.linspace(-6, 6, 3 * 50).view(50, 3).T.contiguous()
    want = layer_operations.activate(products, activation, is_gated=is_gated)
    got = triton_layers.activate(products, activation, is_gated=is_gated)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_tiles_are_as_wide_as_rows() -> None:
    assert triton_layers._row_tile(4096) == (4096, 16)
    assert triton_layers._row_tile(50) == (64, 1)
