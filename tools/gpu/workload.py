"""Starts engines whose models have random weights, as the sections of the GPU check need them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.started import Started, assemble
from oaiserve.engine.start.ways.expanded import start_on_cpu
from oaiserve.engine.start.ways.gpu import start_on_gpu
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.models.decoders import SMALL, byte_tokenizer, random_model, real_shape
from tools.gpu.sections import Target

BLOCK_SIZE = 16
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


def started(loaded: LoadedModel, options: EngineOptions) -> Started:
    return start_on_cpu(loaded, options) if loaded.is_on_cpu else start_on_gpu(loaded, options)


@contextmanager
def running_engine(loaded: LoadedModel, **settings: Any) -> Iterator[Engine]:
    """Run an engine in the block, started as the server starts it. Its memory is free again once the caller has dropped
    it, too. On a CPU it runs without the native step, because the check is about the code that a GPU runs."""
    if loaded.device.type == "cpu":
        settings |= {"compile": False}
    options = EngineOptions(**settings)
    tokenizer = Tokenizer(byte_tokenizer(loaded.vocab_size))
    with Engine(assemble(started(loaded, options), tokenizer, options), options) as engine:
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
