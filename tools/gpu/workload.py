"""Starts engines whose models have random weights, as the sections of the GPU check need them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.device_experts import packed_experts
from oaiserve.engine.model.gpu.device_matrices import packed_linears
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.engine.start.ways.gpu import start_on_gpu
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.models.decoders import SMALL, byte_tokenizer, random_model, real_shape
from tools.gpu.sections import Target

BLOCK_SIZE = 16
# The features that should have been on in this process and were not, each with its reason: the section is wrong then.
OFF: dict[str, str] = {}
# Small models with packed weights, and what they are asked.
SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]


def load(name: str, target: Target, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """Make a model of REAL_SHAPES with random weights."""
    config = real_shape(name, tiny=target.quick)
    return prepare(random_model(config, dtype=dtype, device=target.device), name)


@contextmanager
def saved_model(name: str, target: Target) -> Iterator[str]:
    """Write such a model, and a tokenizer, into a folder that exists in the block."""
    config = real_shape(name, tiny=target.quick)
    with tempfile.TemporaryDirectory() as folder:
        random_model(config, dtype=torch.bfloat16).save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
        yield folder


def started(loaded: LoadedModel, options: EngineOptions, *, is_known: bool = True) -> Started:
    """Start a model as the server does on a GPU, and note in OFF what should be on. One that `is_known` has fused
    layers. On a CPU, for a dry run, transformers' layers compute with attention in plain torch."""
    if loaded.is_on_cpu:
        num_blocks, num_states = cpu_sizes(loaded, options)
        executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=options.block_size)
        sizes = {"num_blocks": num_blocks, "num_states": num_states}
        return started_on_cpu(executor, loaded, options, adaptable(loaded.model), **sizes)
    made = start_on_gpu(loaded, options, Trials())
    note_off(made.features, expected(loaded, options, is_known=is_known))
    return made


def expected(loaded: LoadedModel, options: EngineOptions, *, is_known: bool) -> Iterator[str]:
    """Yield the features that must be on for a model on a GPU."""
    yield from ("attention", "sampling")
    has_experts = bool(packed_experts(loaded.model))
    if packed_linears(loaded.model):
        yield "packed_weights"
    if has_experts:
        yield "packed_experts"
    if options.has_adapters:
        yield "adapters"
    if is_known and options.compile and not options.has_adapters and not loaded.state_shapes:
        yield "fused_layers"
    is_mixture = any("experts" in name for name, _ in loaded.model.named_modules())  # plain ones wait for the host
    if options.cuda_graph and (has_experts or not is_mixture):
        yield "decode_graphs"
        if not loaded.state_shapes:
            yield from ("prompt_graphs", "mixed_graphs")


def note_off(features: Mapping[str, str], wanted: Iterable[str]) -> None:
    """Note the wanted features that are off. `features` has the reason by name, an empty text for one that is on."""
    for name in wanted:
        if reason := features.get(name, "the server does not name it"):
            OFF.setdefault(name, reason)


@contextmanager
def running_engine(loaded: LoadedModel, *, is_known: bool = True, **settings: Any) -> Iterator[Engine]:
    """Run an engine in the block, started as the server starts it on a GPU. Its memory is free again once the caller
    has dropped it, too."""
    options = EngineOptions(**settings)
    tokenizer = Tokenizer(byte_tokenizer(loaded.vocab_size))
    model = assemble(started(loaded, options, is_known=is_known), tokenizer, options)
    with Engine(model, options) as engine:
        yield engine
    del engine
    release()


def ids(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def release() -> None:
    """Give the memory of deleted tensors back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def blocks_for(sequences: int, tokens: int) -> int:
    """Return the number of KV blocks for so many sequences of so many tokens, with one to spare for each."""
    return sequences * (-(-tokens // BLOCK_SIZE) + 1)
