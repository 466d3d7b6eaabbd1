"""A model that is ready to run steps, however it was started, and its conversion for the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from oaiserve.checkpoints.adapters import BadAdapter, read_adapter
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.native.prebuilt import usable_features
from oaiserve.engine.executors.native.variants import AMX_FEATURES
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.model.adapters import load_adapter
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.model.states import States
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.text.end_tokens import end_token_ids
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.adapters import AdapterTable
from oaiserve.errors import StartupError
from oaiserve.runtime import Runtime

if TYPE_CHECKING:
    from oaiserve.engine.executors.reference.executor import ReferenceExecutor

log = logging.getLogger(__name__)

# The grammars' tokens aren't needed for the first answer, and preparing them would hold the GIL for some time.
AFTER_FIRST_ANSWER_SECONDS = 0.5

# A step of this many tokens keeps the device busy. In a longer step, decodes would only wait longer for prefills.
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048


class Started(NamedTuple):
    """Everything the engine needs from a model that is ready to run steps. `ServedModel` explains the shared fields."""

    spec: ModelSpec
    # Rows and columns of the linear layers that adapters may name, keyed by module name.
    adaptable: Mapping[str, tuple[int, int]]
    runner: ModelRunner
    num_blocks: int
    max_model_len: int  # in tokens: the model's, or what the KV cache holds if that is less
    max_step_tokens_default: int
    num_states: int = 0  # sequences that can keep a state; 0 if no layer keeps one
    counts_tokens: bool = False
    warm_up: Callable[[], None] = lambda: None  # called by the engine thread before its first step
    failed: Callable[[BaseException], bool] = lambda error: False  # see `ServedModel`
    block_bytes: int = 0
    weight_bytes: int = 0
    features: Mapping[str, str] = MappingProxyType({})  # the reason why each optional feature is off, or ""


def started_on_cpu(
    executor: NativeDecoder | ReferenceExecutor,
    spec: ModelSpec,
    options: EngineOptions,
    adaptable: Mapping[str, tuple[int, int]],
    *,
    num_blocks: int,
    num_states: int,
) -> Started:
    device = torch.device("cpu")
    runner = ModelRunner(executor, device, options.block_size, states=States.of(spec, num_states))
    features = dict.fromkeys(("native_step", "amx"), "PyTorch computes the steps; the log says why")
    if isinstance(executor, NativeDecoder):
        has_amx = usable_features() >= AMX_FEATURES
        features = {"native_step": "", "amx": "" if has_amx else "the CPU, or --cpu-features, has none"}
    return Started(
        spec,
        adaptable if options.has_adapters else {},
        runner,
        num_blocks,
        longest_request(spec, num_blocks * options.block_size),
        CPU_STEP_TOKENS,
        num_states=num_states,
        block_bytes=options.block_size * spec.kv_bytes_per_token,
        weight_bytes=executor.weight_bytes,
        features=features,
    )


def assemble(started: Started, tokenizer: Tokenizer, options: EngineOptions, runtime: Runtime) -> ServedModel:
    """Make the value that the engine takes. Raises StartupError if an adapter cannot be used."""
    spec = started.spec
    form = " of latent vectors" if spec.has_latent_cache else ""
    if options.kv_cache_dtype != "auto":
        form = f" in {options.kv_cache_dtype}"
    dtype = str(spec.dtype).removeprefix("torch.")
    log.debug(
        "%s on %s in %s: %d KV blocks of %d tokens (%.2f GiB%s), up to %d tokens a request",
        spec.name,
        spec.device,
        dtype,
        started.num_blocks,
        options.block_size,
        started.num_blocks * options.block_size * spec.kv_bytes_per_token / 2**30,
        form,
        started.max_model_len,
    )
    ends = end_token_ids(tokenizer, spec.eos_token_ids | tokenizer.eos_token_ids)
    # Files may name tokens that the model can't produce, such as tokens that a fine-tuning added only to its tokenizer.
    eos_token_ids = frozenset(token_id for token_id in ends if token_id < spec.vocab_size)
    grammars = Grammars(tokenizer.backend, vocab_size=spec.vocab_size, eos_token_ids=eos_token_ids)
    runtime.later("grammars", AFTER_FIRST_ANSWER_SECONDS, grammars.prepared)
    of_engine = started._asdict()
    for name in ("spec", "adaptable"):
        del of_engine[name]
    return ServedModel(
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        device=str(spec.device),
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        adapters=_adapters(started, options, runtime),
        **of_engine,
    )


def _adapters(started: Started, options: EngineOptions, runtime: Runtime) -> AdapterTable:
    def load(number: int, name: str, path: Path) -> None:
        spec = started.spec
        adapter = load_adapter(name, read_adapter(path), started.adaptable, spec.dtype, spec.device)
        started.runner.add_adapter(number, adapter)

    def add(number: int, name: str, path: Path) -> None:
        # In a short-lived thread, because each thread that computes gets worker threads from torch, which compete for
        # cores.
        with runtime.executor("adapter") as loader:
            loader.submit(load, number, name, path).result()

    def size(path: Path) -> int:
        return read_adapter(path).num_numbers * started.spec.dtype.itemsize

    table = AdapterTable(add, started.runner.drop_adapter, started.adaptable, size)
    for name, path in options.adapters.items():
        try:
            table.load(name, path, runtime.unix_ns() // 10**9)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}={path} cannot be used: {error}.") from error
        log.debug("Loaded the adapter '%s' from %s", name, path)
    table.max_bytes = table.num_bytes + options.lora_memory
    return table
