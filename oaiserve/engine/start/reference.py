"""Makes the reference executor of a model on a CPU whose sizes native code does not take, once it is checked."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.check import NUM_TOKENS, refuse_unless_finite
from oaiserve.engine.start.native import refuse_unless_adaptable, refuse_unless_described_alike, small_model_of
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.small_model import attention_parameters, refuse_unless_described
from oaiserve.errors import StartupError
from oaiserve.facts.times import monotonic_ns

log = logging.getLogger(__name__)


def reference_or_none(
    loaded: LoadedModel, options: EngineOptions, *, num_blocks: int, num_threads: int
) -> ReferenceExecutor | None:
    """Make the reference executor; None for a model that has no description, or whose attention can run natively.

    With native attention, transformers' code is faster, and its memory does not grow with the context, either.
    """
    started_ns = monotonic_ns()
    try:
        refuse_unless_it_fits(loaded.kv_shapes.values(), options.block_size)
    except NotKnown as error:
        reason = error
    else:
        return None
    try:
        reference = reference_step(loaded, options, num_blocks=num_blocks)
    except NotKnown as error:
        log.debug("The reference does not run the model: %s", error)
        return None
    except StartupError:
        raise
    except Exception:  # transformers' code can raise anything: it is read and called in unusual ways
        log.exception("The reference does not run the model: its code could not be read")
        return None
    torch.set_num_threads(num_threads)
    seconds = (monotonic_ns() - started_ns) / 1e9
    log.debug("The reference, in plain PyTorch, is ready after %.1f s: %s", seconds, reason)
    return reference


@torch.inference_mode()
def reference_step(loaded: LoadedModel, options: EngineOptions, *, num_blocks: int) -> ReferenceExecutor:
    """Make the reference executor of a loaded model. Raises NotKnown unless a part of it is described rightly."""
    block_size = options.block_size
    decoder = describe(loaded, attention_parameters(loaded, block_size))
    if options.has_adapters:
        refuse_unless_adaptable(loaded.model, decoder)
    model, part = small_model_of(loaded, decoder)
    try:
        small = replace(prepare(model, loaded.name), max_model_len=loaded.max_model_len)
    except StartupError as error:
        raise NotKnown(f"a part of it is refused: {error}".removesuffix(".")) from error
    sizes: dict[str, Any] = {"device": loaded.device, "block_size": block_size}

    def in_float32(small_decoder: Decoder) -> ReferenceExecutor:
        num_checked = -(-NUM_TOKENS // block_size)
        return ReferenceExecutor(small_decoder, dtype=torch.float32, num_blocks=num_checked, **sizes)

    probe = probe_adapter(adaptable(small.model), torch.float32) if options.has_adapters else None
    refuse_unless_described(small, block_size, in_float32, probe)
    refuse_unless_described_alike(describe(small, attention_parameters(small, block_size)), decoder, part)
    reference = ReferenceExecutor(decoder, dtype=loaded.dtype, num_blocks=num_blocks, **sizes)
    refuse_unless_finite(reference, loaded, block_size)
    return reference
