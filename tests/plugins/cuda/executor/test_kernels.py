"""The kernels that the executor of GPUs launches give the reference's logits, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.states import StateChunk
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.compare import difference
from oaiserve.plugins.cuda.executor.executor import CudaExecutor
from oaiserve.plugins.cuda.executor.kernels import triton_kernels
from tests.engine.executors.native.small_models import FAMILIES, load
from tests.engine.executors.test_described_families import case_with
from tests.engine.executors.test_reference_steps import reference, with_keys_and_values
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, sequence_of
from tests.plugins.cuda.executor.test_executor import on_cpu

pytest.importorskip("triton", reason="Triton has no wheels for this system")


# Where exp overflows to infinity, the activation is still right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]


def by_kernels(decoder: Decoder) -> CudaExecutor:
    return on_cpu(decoder, kernels=triton_kernels())


@torch.inference_mode()
def logits_of(executor: Executor, spec: ModelSpec) -> torch.Tensor:
    """Return the logits of three steps: two prompts, two decodes, and a decode with a chunk of a prompt."""
    sequences = [
        sequence_of([(7 * place + 13 * number + 3) % 97 for place in range(22)], range(2 * number, 2 * number + 2))
        for number in range(2)
    ]
    states = states_of(spec)
    found = []
    for parts in ([(0, 0, 5), (1, 0, 17)], [(0, 5, 1), (1, 17, 1)], [(0, 6, 1), (1, 18, 3)]):
        batch = build_batch(
            Step([Chunk(sequences[place], start, count) for place, start, count in parts]), BLOCK_SIZE, CPU
        )
        batch.logits_rows = torch.arange(len(batch.input_ids))
        batch.states = None if states is None else states.of_step([StateChunk(*part) for part in parts])
        found.append(executor.forward(batch).clone())
    return torch.cat(found)


# Norms of queries and keys, and rotation; scaled embeddings and norms after attention; neighbours rotated, and
# attention beside the MLP; biases and positions; layers with the cache of others, and layer inputs; experts of several
# kinds; latent vectors; scaled queries; states.
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "gemma2", "cohere", "gpt2", "phi3", "olmo2", "gemma4_text", "gemma4_text with experts"),
        *("qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3", "ministral3", "qwen3_next", "bamba"),
        "deepseek_v3 with keys and values",
    ],
)
def test_logits_of_the_kernels_are_those_of_the_reference(name: str) -> None:
    family, _, has_keys = name.partition(" with keys")
    spec = load(FAMILIES[family if has_keys else name])
    decoder = spec.decoder
    if has_keys:
        decoder = with_keys_and_values(decoder)
    assert difference(logits_of(by_kernels(decoder), spec), logits_of(reference(decoder), spec)) < 1e-4


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])  # scales of their own; experts without gates
def test_kernels_give_the_logits_of_families_that_only_files_describe(name: str) -> None:
    case = case_with(name, {})
    found, expected = (logits_of(make(case.decoder), case.loaded) for make in (by_kernels, reference))
    assert difference(found, expected) < 1e-4
