"""Starts engines whose models have random weights, as the sections of the GPU check need them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.started import Started, assemble
from oaiserve.engine.start.ways.expanded import start_on_cpu
from oaiserve.engine.start.ways.gpu import start_on_gpu
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.models.decoders import byte_tokenizer, random_model, real_shape
from tools.gpu.target import Target

BLOCK_SIZE = 16


def load(name: str, target: Target, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """Make one of REAL_SHAPES with random weights."""
    config = real_shape(name, tiny=target.quick)
    return prepare(random_model(config, dtype=dtype, device=target.device), name)


def started(loaded: LoadedModel, options: EngineOptions) -> Started:
    return start_on_cpu(loaded, options) if loaded.is_on_cpu else start_on_gpu(loaded, options)


@contextmanager
def running_engine(loaded: LoadedModel, **settings: Any) -> Iterator[Engine]:
    """Run an engine in the block, started as the server starts it. Its memory is free again once the caller has dropped
    it, too. On a CPU it runs without the native step, because the check is about the code that a GPU runs."""
    if loaded.device.type == "cpu":
        settings |= {"compile": False}
    options = EngineOptions(**settings)
    with Engine(assemble(started(loaded, options), _tokenizer(loaded.vocab_size), options), options) as engine:
        yield engine
    del engine
    release()


@functools.cache
def _tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(byte_tokenizer(vocab_size))


def has_graphs(engine: Engine) -> bool:
    """Return whether the engine has captured its decode steps. One that could not runs without, and logs why."""
    return engine._loop._runner.has_graphs  # type: ignore[attr-defined]


def release() -> None:
    """Give the memory of deleted tensors back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def blocks_for(sequences: int, tokens: int) -> int:
    """Return the number of KV blocks for so many sequences of so many tokens, with one to spare for each."""
    return sequences * (-(-tokens // BLOCK_SIZE) + 1)
