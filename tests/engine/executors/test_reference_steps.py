"""Adapters, other dtypes and devices in the reference executor."""

from dataclasses import replace
from random import Random

import pytest
import torch

from oaiserve.engine.decoder.description import Decoder, NotKnown, matrices_in
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.compare import difference
from tests.engine.executors.fake_gpu import GPU
from tests.engine.executors.native.small_models import FAMILIES, GROUPED_MOE, LATENT, config, load, make_model
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS, sequence_of
from tests.models.adapters import adaptable, merged, random_adapter
from tests.models.described import described


def reference(decoder: Decoder, *, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> ReferenceExecutor:
    return ReferenceExecutor(decoder, dtype=dtype, device=device, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def with_keys_and_values(decoder: Decoder) -> Decoder:
    """Return a decoder whose cache has keys and values in place of latent vectors."""
    layers = [
        replace(layer, attention=replace(layer.attention, shape=replace(layer.attention.shape, latent_dim=0)))
        for layer in decoder.layers
    ]
    return replace(decoder, layers=layers)


def batch_of(chunks: list[tuple[list[int], int]], device: torch.device = CPU) -> Batch:
    """Return a batch of sequences with these tokens, each from an index on, in which all logits are wanted."""
    width = NUM_BLOCKS // len(chunks)
    step = Step()
    for place, (ids, start) in enumerate(chunks):
        sequence = sequence_of(ids, range(place * width, place * width + width), name=str(place))
        step.chunks.append(Chunk(sequence, start, len(ids) - start))
    batch = build_batch(step, BLOCK_SIZE, device)
    batch.logits_rows = torch.arange(len(batch.input_ids), device=device)
    return batch


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = Random(0)
    return [[rng.randrange(97) for _ in range(length)] for length in lengths]


# One family for each way in which linear layers are named, fused, sorted, or computed in another form.
ADAPTED = [
    *("llama", "phi3", "gpt2", "gpt_neox", "persimmon", "arcee", "qwen2_moe", "gemma4_text"),
    *("gemma4_text with experts", "deepseek_v2", "deepseek_v3", "deepseek_v3 with keys and values"),
]


@pytest.mark.parametrize("name", ADAPTED)
@torch.inference_mode()
def test_adapters_in_one_batch_are_each_the_model_with_merged_weights(name: str) -> None:
    family = name.removesuffix(" with keys and values")
    model = make_model(FAMILIES[family])
    loaded = described(model)
    shapes = adaptable(model)
    assert loaded.decoder.adaptable() == shapes
    some = {module: shape for index, (module, shape) in enumerate(shapes.items()) if index % 3}
    adapters = [None, random_adapter(shapes, 1), random_adapter(some, 2, rank=30)]
    decoder = loaded.decoder
    executor = reference(decoder if family == name else with_keys_and_values(decoder))
    ids = prompts([9, 21, 5])
    cuts = [8, 18, 3]
    first = batch_of([(own[:cut], 0) for own, cut in zip(ids, cuts, strict=True)])
    second = batch_of(list(zip(ids, cuts, strict=True)))
    first.adapters = second.adapters = adapters
    parts = [executor.forward(batch).split(batch.query_lens) for batch in (first, second)]
    found = [torch.cat(both) for both in zip(*parts, strict=True)]
    for own, adapter, logits in zip(ids, adapters, found, strict=True):
        adapted = model if adapter is None else merged(model, adapter)
        expected = adapted(torch.tensor([own])).logits[0]
        # DeepSeek V2's small model multiplies what rounding leaves: torch in float32 is 3e-5 from itself in float64.
        assert difference(logits, expected) < (2e-4 if family == "deepseek_v2" else 2e-5)
    assert difference(found[1], model(torch.tensor([ids[1]])).logits[0]) > 0.05  # the adapter counts


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "gemma4_text", "qwen3_5_text"])
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_in_transformers(family: str) -> None:
    model = make_model(FAMILIES[family], dtype=torch.bfloat16)
    all_ids = prompts([60] * 8)  # Rounding may send a token to another expert, so one prompt says little.
    loaded = described(model)
    in_bfloat16 = [model(torch.tensor([ids])).logits[0].float() for ids in all_ids]
    model.float()
    theirs = ours = 0.0
    for ids, logits in zip(all_ids, in_bfloat16, strict=True):
        expected = model(torch.tensor([ids])).logits[0]
        theirs += difference(logits, expected)
        states = states_of(loaded)
        batch = batch_of([(ids, 0)])
        batch.states = None if states is None else states.of_step([StateChunk(0, 0, 60)])
        found = reference(loaded.decoder, dtype=torch.bfloat16).forward(batch)
        assert found.dtype == torch.float32
        ours += difference(found, expected)
    assert theirs > 8e-3, "bfloat16 must make a difference"
    assert ours < 1.1 * theirs


WITHOUT_EXPERTS = config("deepseek_v3", **LATENT | {"first_k_dense_replace": 3}, **GROUPED_MOE, q_lora_rank=24)


@pytest.mark.parametrize("family", ["gemma4_text", "gpt2", "bamba", "olmo_hybrid", "lfm2", "latent vectors"])
def test_the_host_reads_no_numbers_of_the_device(family: str) -> None:
    """It does where experts are chosen, whose numbers of tokens are shapes."""
    loaded = load(FAMILIES.get(family, WITHOUT_EXPERTS))
    executor = reference(loaded.decoder, device=GPU)
    batch = batch_of([(ids, 0) for ids in prompts([1, 1, 40, 5])], GPU)
    if loaded.state_shapes:
        states = States(loaded.state_shapes, 5, GPU)
        batch.states = states.of_step([StateChunk(place, 0, count) for place, count in enumerate(batch.query_lens)])
    if loaded.kv_shapes and not loaded.state_shapes:
        adapter = random_adapter(loaded.decoder.adaptable(), 1)
        parts = {name: replace(part, a=part.a.to(GPU), b=part.b.to(GPU)) for name, part in adapter.parts.items()}
        batch.adapters = [None, *[Adapter("on the device", parts)] * 2, None]
    with torch.inference_mode():
        assert executor.forward(batch).shape == (47, 97)


def test_a_cache_in_integers_is_refused() -> None:
    decoder = load(FAMILIES["llama"]).decoder
    first, *others = decoder.layers
    shape = replace(first.attention.shape, is_int8=True)
    changed = replace(decoder, layers=[replace(first, attention=replace(first.attention, shape=shape)), *others])
    with pytest.raises(NotKnown, match="its KV cache has integers of eight bits"):
        reference(changed)


def test_what_is_shared_stays_shared_in_another_dtype() -> None:
    decoder = load(FAMILIES["gemma"]).decoder  # Gemma's head is its embedding
    executor = reference(decoder, dtype=torch.bfloat16)
    placed = executor._decoder
    assert placed.embedding is placed.head.weight
    assert placed.embedding.dtype == torch.bfloat16
    tables = {id(layer.attention.rotary.cosines) for layer in placed.layers}
    assert len(tables) == 1
    matrices = list(matrices_in(placed))
    assert executor.weight_bytes == sum(matrix.weight.nbytes for matrix in matrices)
