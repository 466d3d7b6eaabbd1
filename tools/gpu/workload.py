"""Starts engines whose models have random weights, as the sections of the GPU check need them."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from transformers import PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.described import Described, describe_model, with_shapes
from oaiserve.engine.start.host_memory import offload_blocks
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.start.features import Probed, by_options
from oaiserve.plugins.cuda.start.on_gpu import executor_of, place, start_on_gpu
from oaiserve.plugins.cuda.start.trials import product_ways
from oaiserve.runtime import Runtime
from tests.models.decoders import SMALL, byte_tokenizer, random_model, real_shape
from tools.gpu.sections import Target

BLOCK_SIZE = 16
IN_MEMORY = "/dev/shm"  # where files of 16 GB are written in seconds
# The features that should have been on in this process and were not, each with its reason: the section is wrong then.
OFF: dict[str, str] = {}
ALWAYS_ON = ("kernels",)
PRODUCTS: dict[str, Any] = {}  # how long products of the model that was started last take, and in which ways
# Small models with packed weights, and what they are asked.
SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]


class Files(NamedTuple):
    """A model with random weights in a folder."""

    folder: str
    spec: ModelSpec  # by its files, in the dtype and on the device that it is for


@contextmanager
def model_folder() -> Iterator[str]:
    """Yield a folder that exists in the block, if possible in memory."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if Path(IN_MEMORY).is_dir() else None) as folder:
        yield folder


def described(folder: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Files:
    """Return the model in a folder."""
    options = EngineOptions(dtype=_name_of(dtype), compile=False)
    return Files(folder, describe_model(find_model(folder), options, device=device).spec)


@contextmanager
def saved(model: PreTrainedModel) -> Iterator[Files]:
    """Write a model to a folder that exists in the block."""
    with model_folder() as folder:
        model.save_pretrained(folder)
        yield described(folder, model.device, model.dtype)


@contextmanager
def files_of(name: str, target: Target, dtype: torch.dtype = torch.bfloat16) -> Iterator[Files]:
    """Write a model of REAL_SHAPES, and a tokenizer, to a folder that exists in the block."""
    config = real_shape(name, tiny=target.quick)
    with model_folder() as folder:
        random_model(config, dtype=dtype, device=target.device).save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
        release()
        yield described(folder, target.device, dtype)


def started(model: Described | Files, options: EngineOptions, target: Target | None = None) -> Started:
    """Start a model as the server does on a GPU, and note in OFF what should be on. On a CPU plain PyTorch computes
    it."""
    if isinstance(model, Files):
        model = _in_folder(model, options)
    spec = model.spec
    options = replace(options, dtype=_name_of(spec.dtype), compile=options.compile and not spec.is_on_cpu)
    with nullcontext() if target is None else target.starting():
        placed = place(with_options(model, options), options, spec.name)
        if spec.is_on_cpu:
            num_blocks, num_states = cpu_sizes(placed.spec, options, unpacked_bytes=0)
            executor = executor_of(placed.weights, placed.spec, num_blocks, options=options, kernels=Kernels())
            sizes = {"num_blocks": num_blocks, "num_states": num_states}
            return started_on_cpu(executor, placed.spec, options, placed.adaptable, **sizes)
        possible = by_options(options)
        found = Probed(possible)
        if options.compile and target is not None and not target.is_dry:
            found = product_ways(placed.weights)
            PRODUCTS.clear()
            PRODUCTS.update(seconds=found.seconds, ways=msgspec.to_builtins(found.ways))
            found = msgspec.structs.replace(found, verdict={**possible, **found.verdict})
        made = start_on_gpu(placed, options, found)
    if options.compile:
        note_off(made.features, {name for name, reason in found.verdict.items() if not reason})
    return made


def _in_folder(files: Files, options: EngineOptions) -> Described:
    spec = files.spec
    options = replace(options, dtype=_name_of(spec.dtype), compile=options.compile and not spec.is_on_cpu)
    return describe_model(find_model(files.folder), options, device=spec.device)


def with_options(model: Described, options: EngineOptions) -> Described:
    """Return the model with the length and the KV cache of the options, as if its files had been described with
    them."""
    spec = model.spec.with_cache(options.kv_cache_dtype)
    if options.max_model_len is not None:
        spec = replace(spec, max_model_len=options.max_model_len)
    return model._replace(spec=spec, decoder=with_shapes(model.decoder, spec))


def note_off(features: Mapping[str, str], possible: Iterable[str] = ()) -> None:
    """Note the features that failed, and those that are off although each model has them. `features` has the reason by
    name, an empty text for one that is on."""
    for name in (*ALWAYS_ON, *possible):
        if reason := features.get(name, "the server does not name it"):
            OFF.setdefault(name, reason)


def _name_of(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


@contextmanager
def running_engine(model: Described | Files, target: Target, **settings: Any) -> Iterator[Engine]:
    """Run an engine in the block, started as the server starts it on a GPU. Its memory is free again once the caller
    has dropped it, too."""
    options = EngineOptions(**settings)
    tokenizer = Tokenizer(byte_tokenizer(model.spec.vocab_size))
    with engine_of(started(model, options, target), tokenizer, options, target.runtime) as engine:
        yield engine
    del engine
    release()


def engine_of(made: Started, tokenizer: Tokenizer, options: EngineOptions, runtime: Runtime) -> Engine:
    """Return an engine, with a host pool below its blocks if the options ask for one."""
    served = assemble(made, tokenizer, options, runtime)
    if options.kv_offload is not None:
        served = offload_blocks(served, options.kv_offload)
    return Engine(EngineParts.of(served, options, runtime=runtime))


def ids(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def release() -> None:
    """Give the memory of deleted tensors back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def blocks_for(sequences: int, tokens: int) -> int:
    """Return the number of KV blocks for these sequences of `tokens` tokens each, with one to spare per sequence."""
    return sequences * (-(-tokens // BLOCK_SIZE) + 1)
