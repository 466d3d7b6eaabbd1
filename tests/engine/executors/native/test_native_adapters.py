"""Adapters in the native step: equal to merged weights, and without an influence on other rows."""

import random

import pytest
import torch
from torch import Tensor

from oaiserve.engine.decoder.description import HeadRows
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.compare import difference
from tests.engine.executors.native.small_models import FAMILIES, compiled_for, config, load, make_model, native_decoder
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS, sequence_of
from tests.models.adapters import adaptable, merged, random_adapter
from tests.models.described import SmallModel, described

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
GROUPED = config("llama", max_position_embeddings=512, intermediate_size=176)


def decoder(loaded: SmallModel, *, threads: int = 2, **options: bool) -> NativeDecoder:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": threads}
    return native_decoder(loaded, **{"has_adapters": True, **options}, **sizes)


def batch_of(rows: list[tuple[list[int], int, Adapter | None]]) -> Batch:
    """Return a batch of chunks: the ids of a sequence so far, where the chunk begins, and its adapter.

    The blocks of a chunk are those of its place in the list.
    """
    chunks = []
    for place, (ids, start, _) in enumerate(rows):
        width = NUM_BLOCKS // len(rows)
        own = range(place * width, place * width + width)
        sequence = sequence_of(ids, own, name=str(place), wants_prompt_logprobs=True)
        chunks.append(Chunk(sequence, start, len(ids) - start))
    batch = build_batch(Step(chunks), BLOCK_SIZE, CPU)
    adapters = [adapter for _, _, adapter in rows]
    batch.adapters = adapters if any(adapters) else []
    return batch


@torch.inference_mode()
def logits_of(native: NativeDecoder, batch: Batch) -> list[Tensor]:
    """Return the logits of all tokens of each chunk."""
    prepared = {adapter: native.prepare(adapter) for adapter in {*batch.adapters} - {None}}
    batch.adapters = [prepared.get(adapter) for adapter in batch.adapters]
    logits = native.forward(batch).clone()
    actual_logits = [logits[row : row + 1] for row in range(len(batch.sample_chunks))]
    return [
        torch.cat([logits[first : first + count], actual_logits[index]]) for index, first, count in batch.prompt_rows
    ]


def prompts_for(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


# One family for each way in which linear layers are named, fused, sorted, or computed in another form.
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "phi3", "gpt2", "gpt_neox", "gemma2", "persimmon", "arcee", "granite", "qwen2_moe"),
        *("deepseek_v2", "deepseek_v3", "gemma4_text", "gemma4_text with experts"),
    ],
)
def test_several_adapters_in_one_batch_are_each_the_model_with_merged_weights(family: str) -> None:
    model = make_model(FAMILIES[family])
    loaded = described(model)
    shapes = adaptable(model)
    some = {name: shape for index, (name, shape) in enumerate(shapes.items()) if index % 3}
    adapters = [random_adapter(shapes, 1), random_adapter(some, 2, rank=30), None]
    prompts = prompts_for(loaded.vocab_size, [5, 21, 9])
    native = decoder(loaded)
    sites = [[site] if isinstance(site, HeadRows) else site for site in native._operations.sites]
    assert {part.module for parts in sites for part in parts} == shapes.keys()
    actual_logits = logits_of(native, batch_of([(ids, 0, one) for ids, one in zip(prompts, adapters, strict=True)]))
    for ids, adapter, logits in zip(prompts, adapters, actual_logits, strict=True):
        reference = model if adapter is None else merged(model, adapter)
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
        # DeepSeek V2's small model multiplies what rounding leaves: torch in float32 is 3e-5 from itself in float64.
        assert difference(logits, expected) < (2e-4 if family == "deepseek_v2" else 2e-5)
    assert (
        difference(actual_logits[0], model(torch.tensor([prompts[0]])).logits[0].detach()) > 0.05
    )  # the adapter counts


CASES = {
    "bfloat16": (GROUPED, torch.bfloat16, "native"),
    "float32": (GROUPED, torch.float32, "native"),
    "bfloat16 with AVX2": (GROUPED, torch.bfloat16, "x86-64-v3"),
    "latent vectors": (FAMILIES["deepseek_v3"], torch.bfloat16, "native"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_bitwise_the_same_whatever_adapters_are_beside_it(case: str) -> None:
    asked, dtype, instructions = CASES[case]
    loaded = load(asked, dtype=dtype)
    shapes = loaded.decoder.adaptable()
    adapters = [random_adapter(shapes, seed, rank=rank, dtype=dtype) for seed, rank in enumerate([1, 8, 17, 64])]
    rng = random.Random(1)
    lengths = [30, 1, 7, 12, 40, 3, 5, 2, 25]
    prompts = prompts_for(loaded.vocab_size, lengths)
    chosen = [None, *adapters, *adapters]
    with compiled_for(instructions):
        by_threads = [decoder(loaded, threads=threads) for threads in (1, 2)]
        plain = decoder(loaded, has_adapters=False)
    alone = [logits_of(by_threads[0], batch_of([(ids, 0, one)]))[0]
             for ids, one in zip(prompts, chosen, strict=True)]  # fmt: skip
    assert torch.equal(alone[0], logits_of(plain, batch_of([(prompts[0], 0, None)]))[0])
    for native in by_threads:
        for _ in range(3):
            rows = [(ids, 0, one) for ids, one in zip(prompts, chosen, strict=True)]
            order = rng.sample(range(len(rows)), len(rows))
            order.sort(key=lambda index: len(prompts[index]) > 1)  # single tokens come first
            actual_logits = logits_of(native, batch_of([rows[index] for index in order]))
            for index, logits in zip(order, actual_logits, strict=True):
                assert torch.equal(logits, alone[index]), index


def test_a_decoder_that_was_made_without_adapters_has_no_operation_for_them() -> None:
    loaded = load(FAMILIES["llama"])
    assert "adapters" not in decoder(loaded, has_adapters=False).durations_seconds()
    assert "adapters" in decoder(loaded).durations_seconds()
