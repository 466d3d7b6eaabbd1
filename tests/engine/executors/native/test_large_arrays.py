"""Arrays of more than 2^31 elements are indexed as small ones are.

Their memory is zeros that nobody writes, so the system gives only what a step reads and writes.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from oaiserve.config import KVCacheDtype
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.described import Described
from tests.engine.executors.native.small_models import (
    FAMILIES,
    GROUPED_MOE,
    LATENT,
    config,
    described_by_files,
    load,
    native_of,
)
from tests.engine.model.steps import BLOCK_SIZE, CPU, sequence_of

pytestmark = pytest.mark.compiler
ELEMENTS = 2**31
PIECES = [33, 1, 20, 1]
IDS = [(7 * i + 3) % 97 for i in range(sum(PIECES))]
NUM_BLOCKS = -(-len(IDS) // BLOCK_SIZE)
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 512}
LATENTS = config(
    "deepseek_v3",
    **LATENT | {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},
    **GROUPED_MOE,
    num_experts_per_tok=3,
    q_lora_rank=48,
)


@torch.inference_mode()
def logits_of(
    native: NativeDecoder,
    first_id: int = 0,
    blocks: range = range(NUM_BLOCKS),
    states: States | None = None,
    place: int = 0,
) -> torch.Tensor:
    """Return the logits of a text, computed in pieces, whose ids are from the first one on."""
    logits = []
    start = 0
    for num_tokens in PIECES:
        ids = [first_id + token_id for token_id in IDS[: start + num_tokens]]
        sequence = sequence_of(ids, blocks, wants_prompt_logprobs=True)
        batch = build_batch(Step([Chunk(sequence, start, num_tokens)]), BLOCK_SIZE, CPU)
        if states is not None:
            batch.states = states.of_step([StateChunk(place, start, num_tokens)])
        logits.append(native.forward(batch).clone())
        start += num_tokens
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("asked", "cache"),
    [(config("llama", **HEADS), "auto"), (config("llama", **HEADS), "int8"), (LATENTS, "auto")],
    ids=["bfloat16", "eight bits", "latent vectors"],
)
def test_the_last_blocks_of_a_cache_are_like_the_first(asked: PreTrainedConfig, cache: KVCacheDtype) -> None:
    found = described_by_files(load(asked, dtype=torch.bfloat16).with_cache(cache))
    sizes = {"block_size": BLOCK_SIZE, "num_threads": 2}
    small = native_of(found, num_blocks=NUM_BLOCKS, **sizes)
    of_block = max(tensor[0].numel() for tensor in small.block_tensors)
    num_blocks = ELEMENTS // of_block + 1 + NUM_BLOCKS
    large = native_of(found, num_blocks=num_blocks, **sizes)
    last = range(num_blocks - NUM_BLOCKS, num_blocks)
    assert torch.equal(logits_of(large, blocks=last), logits_of(small))
    for many, few in zip(large.block_tensors, small.block_tensors, strict=True):
        assert torch.equal(many[-NUM_BLOCKS:].view(torch.uint8), few.view(torch.uint8))


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_the_last_states_are_like_the_first(family: str) -> None:
    loaded = load(FAMILIES[family])
    found = described_by_files(loaded)
    native = native_of(found, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=2)
    shapes = [shape for layer in loaded.state_shapes.values() for shape in (layer.conv, layer.recurrent) if shape]
    num_states = ELEMENTS // max(math.prod(shape.shape) for shape in shapes) + 2
    few, many = (States(loaded.state_shapes, number, CPU) for number in (1, num_states))
    assert torch.equal(logits_of(native, states=many, place=num_states - 1), logits_of(native, states=few))
    for of_many, of_few in zip(many._tensors, few._tensors, strict=True):
        assert torch.equal(of_many[-1], of_few[-1])


def test_the_last_rows_of_an_embedding_are_like_the_first() -> None:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 2}
    asked = config("llama", hidden_size=8192, num_hidden_layers=1, tie_word_embeddings=False)
    found = described_by_files(load(asked, dtype=torch.bfloat16))
    few = found.decoder.embedding
    assert isinstance(few, torch.Tensor)
    rows, width = few.shape
    num_rows = ELEMENTS // width + rows
    many = torch.from_numpy(np.zeros((num_rows, width), np.int16)).view(few.dtype)
    many[-rows:] = few
    large = native_of(Described(found.spec, replace(found.decoder, embedding=many), found.library), **sizes)
    assert torch.equal(logits_of(large, first_id=num_rows - rows), logits_of(native_of(found, **sizes)))
