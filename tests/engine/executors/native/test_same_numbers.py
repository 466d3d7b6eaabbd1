"""The native step computes the same bits for a token whatever else a step has, and however its prompt was cut."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedConfig

from oaiserve.config import KVCacheDtype
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Expert, Matrix
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.runner import Launched, ModelRunner
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.described import Described
from oaiserve.facts.engine_numbers import EngineNumbers
from tests.engine.executors.native.small_models import (
    CONVOLUTIONS,
    DELTA,
    EMULATED_AMX,
    GROUPED_MOE,
    LATENT,
    MAMBA2,
    MOE,
    compiled_for,
    config,
    described_by_files,
    load,
    native_decoder,
    native_of,
)
from tests.engine.model.runners import greedy_answers, make_engine, states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS, sequence_of
from tests.models.decoders import SMALL
from tests.models.described import SmallModel
from tests.models.gguf_files import random_blocks
from tests.models.small_configs import config_of

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
# Sums over 1,104 numbers are cut into several blocks, and contexts over 256 tokens into several runs.
LONG = {"max_position_embeddings": 1024, "num_hidden_layers": 2, "intermediate_size": 1104, "initializer_range": 0.2}
GROUPED = config("llama", **LONG, num_attention_heads=4, num_key_value_heads=1, head_dim=48)
WINDOW = config("mistral", **LONG, num_key_value_heads=4, head_dim=80, sliding_window=270)
CAPPED = config("gemma2", **LONG, sliding_window=37, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
MIXTURE = config(
    "qwen2_moe", **LONG, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=48, decoder_sparse_step=1,
    shared_expert_intermediate_size=80,
)  # fmt: skip
CLAMPED = config(
    "gpt_oss", **LONG | {"intermediate_size": 96}, num_local_experts=12, num_experts_per_tok=3, sliding_window=37
)
LATENTS = config(
    "deepseek_v3", **LONG | LATENT, **GROUPED_MOE, num_experts_per_tok=3, num_attention_heads=4, q_lora_rank=40
)
MAMBA = config(
    "granitemoehybrid",
    **LONG | MAMBA2,
    layer_types=DELTA["layer_types"][:2],
    num_local_experts=0,
    shared_intermediate_size=112,
)
CONVOLUTION = config("lfm2", **LONG | {"layer_types": CONVOLUTIONS["layer_types"][:2]})
RECURRENT = config("qwen3_next", **LONG | DELTA | {"layer_types": DELTA["layer_types"][:2]}, **MOE)
FADING = config_of(  # Only its files describe this model.
    "kimi_linear", **LONG, layer_types=DELTA["layer_types"][:2], linear_head_dim=128, linear_num_heads=2, num_experts=8
)
BLOCKY = config("llama", **LONG | {"intermediate_size": 1120})
POINTS = config(
    "llama", **LONG | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 1, "head_dim": 64}
)
NORMED = config("gpt2", n_embd=64, n_layer=2, n_head=4, max_position_embeddings=1024, initializer_range=0.2)

CASES = {
    "bfloat16": (GROUPED, torch.bfloat16, "native"),
    "float32": (WINDOW, torch.float32, "native"),
    "norms with biases": (NORMED, torch.float32, "native"),
    "soft caps": (CAPPED, torch.bfloat16, "native"),
    "experts": (MIXTURE, torch.bfloat16, "native"),
    "latent vectors": (LATENTS, torch.bfloat16, "native"),
    "latent vectors with AVX2": (LATENTS, torch.bfloat16, "x86-64-v3"),
    "experts with AVX2": (MIXTURE, torch.bfloat16, "x86-64-v3"),
    "bfloat16 with AVX-512 alone": (CAPPED, torch.bfloat16, "x86-64-v4"),
    "bfloat16 with AVX2": (WINDOW, torch.bfloat16, "x86-64-v3"),
    "float32 with AVX2": (GROUPED, torch.float32, "x86-64-v3"),
    "experts with AMX": (MIXTURE, torch.bfloat16, EMULATED_AMX),
    "bfloat16 with AMX": (GROUPED, torch.bfloat16, EMULATED_AMX),
    "gated delta nets": (RECURRENT, torch.bfloat16, "native"),
    "gated delta nets with AVX2": (RECURRENT, torch.bfloat16, "x86-64-v3"),
    "decays by row": (FADING, torch.bfloat16, "native"),
    "decays by row with AVX2": (FADING, torch.float32, "x86-64-v3"),
    "Mamba 2": (MAMBA, torch.bfloat16, "native"),
    "Mamba 2 with AVX2": (MAMBA, torch.float32, "x86-64-v3"),
    "short convolutions": (CONVOLUTION, torch.bfloat16, "native"),
    "matrices in blocks": (BLOCKY, torch.float32, "native"),
    "matrices in blocks of points": (POINTS, torch.float32, "native"),
    "cache in eight bits": (GROUPED, torch.bfloat16, "native"),
    "cache in eight bits with AVX2": (CAPPED, torch.bfloat16, "x86-64-v3"),
    "experts in blocks": (CLAMPED, torch.bfloat16, "native"),
    "experts in blocks with AVX2": (CLAMPED, torch.float32, "x86-64-v3"),
}


BLOCK_SIZES = {1: 16, 2: 48, 3: 16}  # by threads


class Native(NamedTuple):
    decoder: NativeDecoder
    block_size: int
    states: States | None


@pytest.fixture(scope="module", params=CASES)
def natives(request: pytest.FixtureRequest) -> dict[int, Native]:
    """Return native steps by their numbers of threads."""
    config, dtype, instructions = CASES[request.param]
    make: Callable[..., NativeDecoder] = blocks_decoder if "in blocks" in request.param else native_decoder
    cache: KVCacheDtype = "int8" if request.param.startswith("cache in eight bits") else "auto"
    loaded = load(config, dtype=dtype).with_cache(cache)
    by_threads = {}
    with compiled_for(instructions):
        for threads, block_size in BLOCK_SIZES.items():
            decoder = make(loaded, num_blocks=NUM_BLOCKS, block_size=block_size, num_threads=threads)
            by_threads[threads] = Native(decoder, block_size, states_of(loaded))
    return by_threads


def blocks_decoder(loaded: SmallModel, **sizes: int) -> NativeDecoder:
    """Make the native step of a model with random blocks in place of its matrices.

    Those of experts are in MXFP4, and others in another format for each shape.
    """
    rng = np.random.default_rng(0)
    scale = 0.01
    kinds = cycle((Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL))
    if loaded.model.config.hidden_size % 256 == 0:
        scale = 1e-4  # These have integers as scales, too.
        kinds = cycle((Kind.IQ1_M, Kind.IQ2_S, Kind.IQ3_S, Kind.TQ1_0, Kind.IQ2_XXS))
    of_shapes: dict[tuple[int, ...], Kind] = defaultdict(lambda: next(kinds))

    def blocks(shape: tuple[int, ...], *, of_expert: bool = False) -> Blocks:
        kind = Kind.MXFP4 if of_expert else of_shapes[shape]
        return Blocks(random_blocks(rng, kind, *shape, scale=scale), int(kind), np.arange(shape[0]))

    def in_blocks(part: Any, *, of_expert: bool = False) -> Any:
        if isinstance(part, Matrix):
            return replace(part, weight=blocks(part.weight.shape, of_expert=of_expert))
        if isinstance(part, list):
            return [in_blocks(one) for one in part]
        if not is_dataclass(part):
            return part
        inner = {field.name: getattr(part, field.name) for field in fields(part)}
        of_expert = isinstance(part, Expert)
        return type(part)(**{name: in_blocks(one, of_expert=of_expert) for name, one in inner.items()})

    described = described_by_files(loaded)
    decoder = replace(in_blocks(described.decoder), embedding=blocks(described.decoder.embedding.shape))
    return native_of(Described(described.spec, decoder, described.library), **sizes)


def new_sequence(index: int, ids: list[int], blocks: list[int]) -> Sequence:
    # With log-probabilities of prompts there are logits of each token.
    return sequence_of(ids, blocks, name=str(index), state=index, wants_prompt_logprobs=True)


def chunk_of(sequence: Sequence, num_tokens: int) -> Chunk:
    """Return the next chunk of a sequence, which draws if it ends the prompt."""
    start = sequence.num_computed
    sequence.num_computed += num_tokens
    return Chunk(sequence, start, num_tokens, max_draws=int(sequence.num_computed == len(sequence.token_ids)))


def compute(native: Native, step: Step, found: dict[tuple[str, int], Tensor]) -> None:
    """Compute a step, and keep the logits of each token under its sequence and position."""
    step.chunks.sort(key=lambda chunk: chunk.num_tokens > 1)  # single tokens come first
    batch = build_batch(step, native.block_size, CPU)
    if native.states is not None:
        parts = [StateChunk(chunk.sequence.state or 0, chunk.start, chunk.num_tokens) for chunk in step.chunks]
        batch.states = native.states.of_step(parts)
    with torch.inference_mode():
        logits = native.decoder.forward(batch).clone()
    for row, index in enumerate(batch.sample_chunks):
        chunk = step.chunks[index]
        found[chunk.sequence.request_id, chunk.end - 1] = logits[row]
    for index, first, num_rows in batch.prompt_rows:
        chunk = step.chunks[index]
        for i in range(num_rows):
            found[chunk.sequence.request_id, chunk.start + i] = logits[first + i]


def alone(native: Native, prompts: list[list[int]]) -> dict[tuple[str, int], Tensor]:
    """Compute each prompt by itself, in one step."""
    logits: dict[tuple[str, int], Tensor] = {}
    for index, ids in enumerate(prompts):
        compute(native, Step([chunk_of(new_sequence(index, ids, list(range(NUM_BLOCKS))), len(ids))]), logits)
    return logits


def in_company(native: Native, prompts: list[list[int]], rng: random.Random) -> dict[tuple[str, int], Tensor]:
    """Compute the prompts together, in random pieces, in blocks in random order."""
    logits: dict[tuple[str, int], Tensor] = {}
    blocks = iter(rng.sample(range(NUM_BLOCKS), NUM_BLOCKS))
    sequences = [
        new_sequence(index, ids, [next(blocks) for _ in range(-(-len(ids) // native.block_size))])
        for index, ids in enumerate(prompts)
    ]
    while left := [sequence for sequence in sequences if sequence.num_computed < len(sequence.token_ids)]:
        step = Step()
        for sequence in rng.sample(left, rng.randint(1, len(left))):
            most = len(sequence.token_ids) - sequence.num_computed
            num_tokens = min(most, rng.choice([1, 2, 7, 16, rng.randint(1, 130), most]))
            step.chunks.append(chunk_of(sequence, num_tokens))
        compute(native, step, logits)
    return logits


@given(
    lengths=st.lists(st.integers(1, 600) | st.sampled_from([255, 256, 257, 513]), min_size=1, max_size=6).filter(
        lambda lengths: sum(-(-length // BLOCK_SIZE) for length in lengths) <= NUM_BLOCKS
    ),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=3)
@example(lengths=[600], seed=0)
@example(lengths=[13, 300, 257, 25, 1, 600], seed=1)
def test_logits_of_each_token_are_those_of_its_prompt_alone(
    natives: dict[int, Native], lengths: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(SMALL["vocab_size"]) for _ in range(length)] for length in lengths]
    expected = alone(natives[1], prompts)
    for num_threads, native in natives.items():
        actual = in_company(native, prompts, rng)
        assert actual.keys() == expected.keys()
        differing = [key for key in expected if not torch.equal(actual[key], expected[key])]
        assert not differing, f"with {num_threads} threads, (sequence, position): {differing[:5]}"


# Single tokens at the start, and where the first windows (37 and 270) and runs of the cache (256 and 512) end.
PIECES = [*[1] * 45, 195, *[1] * 50, 215, *[1] * 25]


def test_decoding_token_by_token_gives_the_logits_of_the_prompt_as_a_whole(natives: dict[int, Native]) -> None:
    rng = random.Random(3)
    ids = [rng.randrange(SMALL["vocab_size"]) for _ in range(sum(PIECES))]
    expected = alone(natives[1], [ids])
    for native in natives.values():
        logits: dict[tuple[str, int], Tensor] = {}
        sequence = new_sequence(0, ids, list(range(NUM_BLOCKS)))
        for num_tokens in PIECES:
            compute(native, Step([chunk_of(sequence, num_tokens)]), logits)
        assert logits.keys() == expected.keys()
        assert all(torch.equal(logits[key], expected[key]) for key in expected)


SHORT = [[*range(20, 60), 4], [5, 9, 3, 17], list(range(20, 75)), [7] * 20, [90], [11, 40, 11], list(range(30, 64))]
LONG_ENOUGH = [(5 * i + 2) % 97 for i in range(81)]  # for its state to be kept


class RecordingRunner(ModelRunner):
    """A runner that keeps the bytes of the logits after each text."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logits: dict[tuple[int, ...], set[bytes]] = {}

    def launch(self, step: Step) -> Launched:
        launched = super().launch(step)
        for index, logits in zip(launched.sample_chunks, launched.logits, strict=True):
            chunk = step.chunks[index]
            text = tuple(chunk.sequence.token_ids[: chunk.end])
            self.logits.setdefault(text, set()).add(logits.numpy().tobytes())
        return launched


@pytest.mark.parametrize(
    ("asked", "cache"),
    [(GROUPED, "auto"), (GROUPED, "int8"), (LATENTS, "auto"), (RECURRENT, "auto")],
    ids=["plain", "cache in eight bits", "latent vectors", "states"],
)
def test_requests_get_the_same_logits_alone_together_from_the_cache_and_after_preemption(
    asked: PreTrainedConfig, cache: KVCacheDtype
) -> None:
    loaded = load(asked, dtype=torch.bfloat16).with_cache(cache)
    prompts = [*SHORT, LONG_ENOUGH] if loaded.state_shapes else SHORT
    results: list[tuple[list[list[int]], dict[tuple[int, ...], set[bytes]], EngineNumbers]] = []
    for num_blocks, limits in (
        (64, {"max_running": 1, "prefix_cache": False}),
        (64, {"max_running": 16, "max_step_tokens": 100}),
        (7, {"max_running": 7, "max_step_tokens": 7}),
    ):
        n = 1 if limits["max_running"] == 1 else 2
        decoder = native_decoder(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=2)
        runner = RecordingRunner(decoder, CPU, BLOCK_SIZE, states=states_of(loaded))
        with make_engine(loaded, runner, num_blocks=num_blocks, **limits) as engine:
            answers = [ids for _ in range(2) for ids in greedy_answers(engine, prompts, 14, n=n)[::n]]
            results.append((answers, runner.logits, engine.snapshot()))
    (alone, logits, _), together, preempted = results
    assert together[2].num_prefix_hits > 0
    assert preempted[2].num_preemptions > 0
    assert all(len(kinds) == 1 for kinds in logits.values())
    for answers, others, _ in (together, preempted):
        assert answers == alone
        assert others == logits
