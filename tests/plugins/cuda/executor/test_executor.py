"""The executor of GPUs computes the reference's logits, however prompts are cut and packed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.model_spec import kv_shapes
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, BatchMedia
from oaiserve.engine.model.padded_head import aligned
from oaiserve.engine.model.states import StateChunk
from oaiserve.engine.start.compare import difference
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights, refuse_without_kernels
from oaiserve.plugins.cuda.executor.kernels import Kernels
from tests.engine.executors.native.small_models import FAMILIES, load
from tests.engine.executors.test_reference import LARGEST_ERROR, MEDIAN_ERROR, Case, case_of, errors, in_float32
from tests.engine.executors.test_reference_fields import covering_models, logits_of, mutants
from tests.engine.executors.test_reference_steps import ADAPTED, batch_of, prompts, reference, with_keys_and_values
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS
from tests.models.adapters import random_adapter
from tests.models.described import described
from tests.models.pinned import PINNED, pinned_model


def on_cpu(
    decoder: Decoder,
    *,
    kernels: Kernels | None = None,
    dtype: torch.dtype = torch.float32,
) -> CudaExecutor:
    return on_weights(CudaWeights(decoder, dtype=dtype, device=CPU), decoder, kernels)


def on_weights(weights: CudaWeights, decoder: Decoder, kernels: Kernels | None = None) -> CudaExecutor:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    return CudaExecutor(weights, kv_shapes(decoder), **sizes, kernels=kernels or Kernels())


def batch_with(spec: ModelSpec, chunks: list[tuple[list[int], int]]) -> Batch:
    """Return a batch of sequences with these tokens, each from an index on, with new states of the model."""
    batch = batch_of(chunks)
    if (states := states_of(spec)) is not None:
        parts = zip((start for _, start in chunks), batch.query_lens, strict=True)
        batch.states = states.of_step([StateChunk(place, *part) for place, part in enumerate(parts)])
    return batch


def case_by_reference(model: PreTrainedModel) -> Case:
    """Return the case of a model, with the logits of the reference for whole sequences."""
    spec = described(model)
    decoder = spec.decoder

    def logits_of(ids: Tensor, use_cache: bool) -> SimpleNamespace:
        own = replace(spec, state_shapes={layer: in_float32(kept) for layer, kept in spec.state_shapes.items()})
        batch = batch_with(own, [(one, 0) for one in ids.tolist()])
        return SimpleNamespace(logits=reference(decoder).forward(batch).view(*ids.shape, -1))

    return case_of(logits_of, spec, decoder)


@pytest.mark.parametrize("name", PINNED)
def test_logits_are_those_of_the_reference(name: str) -> None:
    case = case_by_reference(pinned_model(name))
    found = errors(case, executor=on_cpu(case.decoder))
    assert found.median() < MEDIAN_ERROR
    assert found.max() < LARGEST_ERROR


@torch.inference_mode()
def test_executor_of_gpus_obeys_every_field() -> None:
    """Descriptions with another value in one field each give the logits of the reference, or are refused by both."""
    random = Random(0)
    num_checked = 0
    for decoder, spec in covering_models():
        last = {name: (names, mutant) for names, mutant in mutants(decoder) for name in names}
        changed = dict(last.values())  # the last one of each field, which may be the same for several fields
        for names, mutant in random.sample(sorted(changed.items(), key=lambda item: item[0]), len(changed)):
            if has_no_kernels(mutant):
                assert outcome(on_cpu, mutant, spec) is None, names
                continue
            outcomes = [outcome(make, mutant, spec) for make in (reference, on_cpu)]
            assert (outcomes[0] is None) == (outcomes[1] is None), names
            if outcomes[0] is not None:
                num_checked += 1
                torch.testing.assert_close(
                    outcomes[1], outcomes[0], rtol=2e-3, atol=2e-3, msg=str(names), equal_nan=True
                )
    assert num_checked > 300


def has_no_kernels(decoder: Decoder) -> bool:
    try:
        refuse_without_kernels(decoder)
    except NotKnown:
        return True
    return False


def outcome(make: Any, decoder: Decoder, spec: ModelSpec) -> Tensor | None:
    """Return logits, or None if sizes do not fit together."""
    try:
        return logits_of(make(decoder), spec)
    except (AssertionError, IndexError, KeyError, NotKnown, RuntimeError, ValueError):
        return None


@torch.inference_mode()
def test_images_take_the_places_of_tokens() -> None:
    decoder = load(FAMILIES["qwen3"]).decoder
    axes = torch.tensor([0, 1, 2, 0] * 4, dtype=torch.int32)
    layers = [
        replace(layer, attention=replace(layer.attention, rotary=replace(layer.attention.rotary, axes=axes)))
        for layer in decoder.layers
    ]
    decoder = replace(decoder, layers=layers, vector_scale=0.5, padding_id=3, num_deep=2)
    batch = batch_of([(ids, 0) for ids in prompts([1, 20, 9])])
    rows = torch.arange(5, 12)
    batch.input_ids[rows] = 100_000  # outside of the vocabulary
    width = decoder.embedding.shape[1]
    vectors = torch.randn(4, len(rows), width, generator=torch.Generator().manual_seed(1))
    batch.media = BatchMedia(rows, vectors[0], tuple(vectors[1:]))
    batch.axes = torch.stack([batch.positions, batch.positions // 2, batch.positions % 3])
    batch.last_visible = batch.positions.clone()
    batch.last_visible[rows] = rows[-1] - 1
    expected = reference(decoder).forward(batch)
    torch.testing.assert_close(on_cpu(decoder).forward(batch), expected, rtol=1e-4, atol=1e-4)


class AllRows:
    """The captured addition of one adapter to all rows."""

    def __init__(self, adapter: Adapter) -> None:
        self.modules = adapter.parts.keys()
        self._adapter = adapter

    def __call__(self, module: str, x: Tensor, out: Tensor) -> None:
        out += self._adapter.parts[module].added(x)


@pytest.mark.parametrize("name", ADAPTED)
@torch.inference_mode()
def test_adapters_add_what_they_add_in_the_reference(name: str) -> None:
    decoder = load(FAMILIES[name.removesuffix(" with keys and values")]).decoder
    decoder = with_keys_and_values(decoder) if name.endswith("with keys and values") else decoder
    adapters = [None, random_adapter(decoder.adaptable(), 1), random_adapter(decoder.adaptable(), 2, rank=30)]
    batch = batch_of([(ids, 0) for ids in prompts([9, 21, 5])])
    executor = on_cpu(decoder)
    batch.adapters = adapters
    expected = reference(decoder).forward(batch)
    batch.adapters = [None if adapter is None else executor.prepare(adapter) for adapter in adapters]
    assert difference(executor.forward(batch), expected) < 2e-5
    plain = batch_of([(ids, 0) for ids in prompts([9, 21, 5])])
    assert difference(executor.forward(plain), expected) > 0.05  # the adapters count


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "qwen2_moe", "gemma4_text"])
@torch.inference_mode()
def test_captured_adapters_add_to_the_products_of_their_modules(name: str) -> None:
    decoder = load(FAMILIES[name]).decoder
    adapter = random_adapter(decoder.adaptable(), 1)
    batch = batch_of([(ids, 0) for ids in prompts([9, 21])])
    executor = on_cpu(decoder)
    batch.adapters = [adapter, adapter]
    expected = reference(decoder).forward(batch)
    batch.adapters = []
    batch.captured_adapters = AllRows(executor.prepare(adapter))
    assert difference(executor.forward(batch), expected) < 2e-5


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2", "gemma4_text", "qwen3_5_text", "granite"])
@torch.inference_mode()
def test_bfloat16_is_almost_as_close_to_float32_as_the_reference(name: str) -> None:
    spec = load(FAMILIES[name], dtype=torch.bfloat16)
    decoder = spec.decoder
    ids = [(prompts([60])[0], 0)]
    expected = reference(decoder).forward(batch_with(spec, ids))
    found = on_cpu(decoder, dtype=torch.bfloat16).forward(batch_with(spec, ids))
    assert found.dtype == torch.bfloat16
    in_bfloat16 = reference(decoder, dtype=torch.bfloat16)
    own = difference(in_bfloat16.forward(batch_with(spec, ids)), expected)
    assert own > 1e-3, "bfloat16 must make a difference"
    assert difference(found.float(), expected) < 2 * own  # hidden states are rounded, too


@torch.inference_mode()
def test_joined_weights_are_on_the_device_once() -> None:
    decoder = load(FAMILIES["gemma"]).decoder  # Gemma's head is its embedding
    weights = CudaWeights(decoder, dtype=torch.float32, device=CPU)
    assert weights._head.weight.data_ptr() == weights._embedding.data_ptr()
    matrices = [layer.attention.out for layer in decoder.layers] + [layer.mlp.down for layer in decoder.layers]
    matrices += [matrix for layer in decoder.layers for matrix in [*layer.attention.qkv, layer.mlp.gate, layer.mlp.up]]
    num_rows, columns = decoder.head.weight.shape
    head_bytes = aligned(num_rows) * columns * 4
    assert weights.num_bytes == head_bytes + sum(matrix.weight.nbytes for matrix in matrices)


@torch.inference_mode()
def test_rows_of_logits_are_aligned() -> None:
    decoder = load(FAMILIES["llama"]).decoder
    logits = on_cpu(decoder).forward(batch_of([(prompts([9])[0], 0)]))
    assert (logits.shape[1], logits.stride()) == (97, (aligned(97), 1))
