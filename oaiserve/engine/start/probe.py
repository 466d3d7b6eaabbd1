"""Probes whether native code computes correctly on this machine: once for each library, whose name depends on CPU,
compiler and version.

The native step and the reference executor both compute synthetic layers of all kinds. Whether the description of a
model is right is another question, which tests answer for each family.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.mixers import state_shapes
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.start.check import batches
from oaiserve.engine.start.compare import compare
from oaiserve.engine.start.probe_layers import POSITIONS, VOCAB_SIZE, ProbeLayers
from oaiserve.storage import private
from oaiserve.storage.private import NotPrivate, cache_folder
from oaiserve.storage.start_cache import version_of

log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
# How far logits may be apart, relative to their norm: at least five times as far as rounding causes. With weights in
# blocks, native code rounds the numbers that it multiplies by them to 8 bits.
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
_LIMIT_OF_BLOCKS = 0.05


class WrongHere(NotKnown):
    """On this machine, native code computes other results than plain PyTorch."""


@torch.inference_mode()
def refuse_unless_probed(library: Library, *, again: bool = False) -> None:
    """Raise WrongHere unless the library computes all kinds of layers correctly, now or in an earlier start."""
    folder = cache_folder() / "probed"
    path = folder / f"{library.name}-{version_of('oaiserve')}-{version_of('torch')}"
    try:
        if not again and folder.exists() and (private.verified(folder) / path.name).exists():
            return
    except (NotPrivate, OSError) as error:
        log.debug("Native code is probed again: %s", error)
    probe(library)
    try:
        private.make_folder(folder)
        private.write_file(path, b"")
    except (NotPrivate, OSError) as error:
        log.debug("The next start probes native code again: %s", error)


def probe(library: Library) -> None:
    """Raise WrongHere for the first kind of layer that native code computes differently from the reference."""
    for name, decoder in ProbeLayers(library.dtype).decoders():
        has_blocks = name.startswith("weights in")
        _compare(library, name, decoder, _LIMIT_OF_BLOCKS if has_blocks else _LIMITS[library.dtype])


def _compare(library: Library, name: str, decoder: Decoder, limit: float) -> None:
    spec = _spec(decoder, library.dtype)
    sizes: dict[str, Any] = {"num_blocks": 1, "block_size": _BLOCK_SIZE}
    native = NativeDecoder(library, decoder, num_threads=1, **sizes)
    reference = ReferenceExecutor(decoder, dtype=torch.float32, device=spec.device, **sizes)
    computed = batches(spec, _BLOCK_SIZE)
    # Both executors write to the states of a step, so each gets its own.
    expected = [reference.forward(batch) for batch in batches(spec, _BLOCK_SIZE)]
    named = ((name, pair) for pair in zip(computed, expected, strict=True))
    difference = compare(lambda pair: native.forward(pair[0]), lambda pair: pair[1], named, limit)
    if difference is not None:
        raise WrongHere(
            f"native code computes {name} otherwise than plain torch on this machine, by {difference.apart:.1%}"
        )


def _spec(decoder: Decoder, dtype: torch.dtype) -> ModelSpec:
    attention = decoder.layers[0].attention
    return ModelSpec(
        name="probe",
        device=torch.device("cpu"),
        dtype=dtype,
        vocab_size=VOCAB_SIZE,
        max_model_len=POSITIONS,
        eos_token_ids=frozenset(),
        kv_shapes={} if attention is None else {0: attention.shape},
        state_shapes=state_shapes(decoder, dtype),
    )
