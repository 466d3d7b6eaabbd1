"""Models with random weights without files: they are described like those of files, and can be placed and computed."""

import pytest
import torch

from oaiserve.engine.decoder.description import Experts, matrices_in
from oaiserve.engine.decoder.sources.unread_matrix import UnreadMatrix
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.states import States
from oaiserve.engine.start.check import batch_of
from oaiserve.engine.start.described import Described
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from tests.models.decoders import random_model, real_shape
from tests.models.described import described
from tests.models.packed import Packing
from tests.models.small_configs import config_of
from tools.gpu.models import described_on

CPU = torch.device("cpu")
META = torch.device("meta")


@torch.inference_mode()
def logits_of(model: Described, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weights = CudaWeights(model.decoder, dtype=dtype, device=model.spec.device)
    executor = CudaExecutor(weights, model.spec.kv_shapes, num_blocks=8, block_size=4, kernels=Kernels())
    return executor.forward(batch_of(prompt(9, model.spec.vocab_size, 4), model.spec, 4, States.of(model.spec, 1)))


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "qwen3_moe", "mixtral", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_a_model_is_described_as_by_its_files(family: str) -> None:
    config = config_of(family)
    model = random_model(config)
    of_files = described(model)
    found = described_on(config, CPU, dtype=torch.float32)
    shapes = [(one.module, tuple(one.weight.shape)) for one in matrices_in(found.decoder)]
    assert shapes == [(one.module, tuple(one.weight.shape)) for one in matrices_in(of_files.decoder)]
    assert found.spec.kv_shapes == of_files.kv_shapes
    assert logits_of(found).isfinite().all()


@pytest.mark.parametrize(
    ("packing", "kind"),
    [
        (Packing("awq"), "int4"),
        (Packing("gptq", has_act_order=True), "int4"),
        (Packing("gptq", bits=8), "int8"),
        (Packing("pack-quantized", is_symmetric=True), "int4"),
        ("fp8", "float8"),
    ],
)
def test_the_matrices_of_layers_are_packed_as_asked(packing: Packing | str, kind: str) -> None:
    model = described_on(config_of("llama"), CPU, dtype=torch.float32, packing=packing)
    weights = CudaWeights(model.decoder, dtype=torch.float32, device=CPU)
    assert [matrix.kind for matrix in weights.packed] == [kind] * 4 * len(model.decoder.layers)
    assert logits_of(model).isfinite().all()


def test_experts_are_in_mxfp4() -> None:
    model = described_on(config_of("gpt_oss", intermediate_size=128), CPU, dtype=torch.float32, packing="mxfp4")
    weights = CudaWeights(model.decoder, dtype=torch.float32, device=CPU)
    assert {matrix.kind for matrix in weights.packed} == {"mxfp4"}
    assert logits_of(model).isfinite().all()


def test_experts_are_packed_one_by_one() -> None:
    model = described_on(config_of("qwen3_moe"), CPU, packing=Packing("awq", group_size=16))
    assert {type(matrix.weight) for matrix in matrices_in(model.decoder.layers[0].attention)} == {UnreadMatrix}
    experts = model.decoder.layers[0].mlp
    assert isinstance(experts, Experts)
    assert {type(matrix.weight) for matrix in matrices_in(experts.experts)} == {UnreadMatrix}


def test_a_tensor_is_the_same_whenever_it_is_read_and_others_differ() -> None:
    one, again = (described_on(config_of("llama"), CPU, dtype=torch.float32) for _ in range(2))
    assert torch.equal(logits_of(one), logits_of(again))
    packed = described_on(config_of("llama"), CPU, dtype=torch.float32, packing="fp8")
    assert torch.equal(logits_of(packed), logits_of(packed))
    large = described_on(real_shape("llama-3.1-8b"), META)
    assert large.decoder.embedding is not large.decoder.head.weight
    weights = [matrix.weight for matrix in matrices_in(large.decoder)]
    begins = {weight.storage_offset() for weight in weights if isinstance(weight, torch.Tensor)}
    assert len(begins) > len(weights) - 3  # few begin by chance where another does


def test_large_models_have_only_shapes_on_the_device_meta() -> None:
    for packing in (None, Packing("awq", group_size=128), "fp8"):
        model = described_on(real_shape("llama-3.1-8b"), META, packing=packing)
        weights = CudaWeights(model.decoder, dtype=torch.bfloat16, device=META)
        assert weights.widest == 28_672
        assert weights.num_bytes > 4e9
