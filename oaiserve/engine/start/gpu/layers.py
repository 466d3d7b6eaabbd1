"""Compares fused layers with transformers' code, by the model's logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.fused_layers import FusedExecutor, FusedLayers
from oaiserve.engine.model.gpu.joined_product import Multiply
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.start.compare import Difference, compare, tolerance
from oaiserve.engine.start.gpu.attention_parameters import attention_parameters
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.step import Chunk, Step

log = logging.getLogger(__name__)

FUSED_LENGTHS = (9, 40, 17, 600)  # of sequences whose logits are compared; the last is read by several programs


@torch.inference_mode()
def described(loaded: LoadedModel, block_size: int) -> Decoder:
    """Describe a model by its operations and weights, as the native step of a CPU does. Raises NotKnown."""
    with loaded.device:  # where what the description makes, such as rotary tables, is to be
        return describe(loaded, attention_parameters(loaded, block_size))


@torch.inference_mode()
def fuse_layers(loaded: LoadedModel, options: EngineOptions, trials: Trials) -> FusedLayers | None:
    """Return the layers of a model as they run by its description, or None for a model that has none.

    What a description has beside the weights is in the device's memory from now on.
    """
    found: list[FusedLayers] = []
    unknown: list[str] = []

    def problem() -> str | None:
        try:
            exact = _exact_product() if options.exact else None
            found.append(FusedLayers(loaded, described(loaded, options.block_size), _operations(), exact))
        except NotKnown as error:  # the reason is in the model: no user can do anything about it
            log.debug("The model's layers run in transformers' code: %s", error)
            unknown.append(str(error))
        return None

    if not trials.is_usable("fused_layers", problem):
        return None
    if unknown:
        trials.off["fused_layers"] = unknown[0]
    return found[0] if found else None


@torch.inference_mode()
def fuse_layers_checked(
    layers: FusedLayers,
    eager: EagerExecutor,
    loaded: LoadedModel,
    backend: Backend,
    trials: Trials,
    *,
    num_blocks: int,
    block_size: int,
) -> FusedExecutor | None:
    """Return the executor of fused layers, unless its logits would differ. Both write into the first blocks."""
    fused = FusedExecutor(layers, eager.caches, backend)

    def problem() -> Difference | None:
        batches = _batches(loaded, num_blocks=num_blocks, block_size=block_size)
        return compare(fused.forward, eager.forward, batches, tolerance(loaded.dtype))

    return fused if trials.is_usable("fused_layers", problem) else None


@torch.inference_mode()
def exactness_problem(executor: Executor, loaded: LoadedModel, *, num_blocks: int, block_size: int) -> str | None:
    """Compare the logits of sequences that decode together with those of each as a prompt alone, bit by bit."""
    steps = prompts_and_decodes(_lengths(loaded, num_blocks, block_size), loaded.vocab_size, block_size)
    for step in steps:
        logits = executor.forward(build_batch(step, block_size, loaded.device))
    together = logits.clone()
    for row, chunk in enumerate(steps[1].chunks):
        whole = build_batch(Step([Chunk(chunk.sequence, 0, chunk.end)]), block_size, loaded.device)
        if not torch.equal(executor.forward(whole)[0], together[row]):
            return f"the last of {chunk.end} tokens has other logits in a prompt of its own than in a step with others"
    return None


def _lengths(loaded: LoadedModel, num_blocks: int, block_size: int) -> list[int]:
    """Return the lengths of sequences that fit into the cache, and the model."""
    lengths = [length for length in FUSED_LENGTHS if length <= loaded.max_model_len]
    while len(lengths) > 1 and sum(-(-length // block_size) for length in lengths) > num_blocks:
        lengths.pop()
    return lengths


def _batches(loaded: LoadedModel, *, num_blocks: int, block_size: int) -> Iterator[tuple[str, Batch]]:
    """Yield prompts and decodes, and the decodes at the model's last position, where rotary tables end."""
    lengths = _lengths(loaded, num_blocks, block_size)
    if not lengths:
        return
    for step in prompts_and_decodes(lengths, loaded.vocab_size, block_size):
        step = Step([chunk._replace(max_draws=1) for chunk in step.chunks])
        batch = build_batch(step, block_size, loaded.device)
        yield "the outputs", batch
    yield "the outputs", replace(batch, positions=torch.full_like(batch.positions, loaded.max_model_len - 1))


def _exact_product() -> Multiply:
    from oaiserve.engine.model.gpu.triton_exact import exact_product

    return exact_product


def _operations() -> ModuleType:
    from oaiserve.engine.model.gpu import triton_layers

    return triton_layers
