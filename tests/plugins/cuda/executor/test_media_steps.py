"""On the executor of GPUs, too, steps of prompts with images give transformers' own logits."""

from pathlib import Path

import pytest
import torch

from oaiserve.checkpoints.source import find_model
from oaiserve.engine.start.described import describe_model
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from tests.engine.model.steps import CPU
from tests.engine.model.test_media_steps import BLOCK_SIZE, FAMILIES, NUM_BLOCKS, OPTIONS, check, random_pair


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("name", "backend"),
    [("qwen2_5_vl", "plain"), ("qwen3_vl", "triton"), ("glm4v", "plain"), ("gemma3", "triton")],
)
def test_logits_equal_those_of_the_multimodal_model(name: str, backend: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.plugins.cuda.executor.triton_attention import TritonAttention

    wrapper, loaded = random_pair(name, tmp_path)
    spec, decoder, *_ = describe_model(find_model(tmp_path), OPTIONS)
    weights = CudaWeights(decoder, dtype=torch.float32, device=CPU)
    kernels = Kernels(TritonAttention) if backend == "triton" else Kernels()
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    executor = CudaExecutor(weights, spec.kv_shapes, **sizes, kernels=kernels)
    check(wrapper, loaded, lambda: executor, FAMILIES[name], num_tries=2)
