"""Starts without kernels that a GPU can't compile or that need more of it than it has. Plain torch replaces them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from oaiserve.checkpoints.load_errors import named
from oaiserve.plugins.cuda.start.features import Probed, warn_unfit

T = TypeVar("T")

_OF_COMPILER = "PassManager::run failed"  # compiler passes raise it as a RuntimeError


class Part(NamedTuple):
    """A part of the computation, and the fields of `Kernels` with its kernels."""

    name: str
    fields: tuple[str, ...]
    can_be_captured: bool = False  # whether graphs can contain plain torch instead


# By the last part of the name of the module that launches the kernels. Plain torch has no gates of gpt-oss, which only
# `experts` needs.
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "triton_attention": Part("attention", ("attention",)),
        "triton_latent": Part("attention to latent vectors", ("latent_attention",)),
        "triton_layers": Part("norms and activations", ("operations", "experts")),
        "triton_products": Part("products in few bits and experts", ("multiply", "experts")),
        "triton_states": Part("layers with a state", ("recurrence",), can_be_captured=True),
        "triton_adapters": Part("adapters", ("adapters",)),
        "triton_sampling": Part("draws", ("sampling",)),
    }
)


def fitting(found: Probed, run: Callable[[Probed], T]) -> tuple[T, Probed]:
    """Run with the findings of an earlier probe.

    Run again without each kernel that doesn't compile for the device, or doesn't fit on it. Return the result, and the
    findings with the kernels that are off.
    """
    while True:
        try:
            return run(found), found
        except Exception as error:
            part = part_of(error)
            if part is None or part.name in found.unfit:
                raise
            found = without(found, part, named(error))
        warn_unfit(part.name, found.unfit[part.name])


def part_of(error: Exception) -> Part | None:
    """Return the part whose kernel Triton could not compile or load. None means that the error has another cause."""
    if not type(error).__module__.startswith("triton.") and _OF_COMPILER not in str(error):
        return None
    modules = (frame.f_globals["__name__"].rpartition(".")[2] for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((PARTS[module] for module in modules if module in PARTS), None)


def without(found: Probed, part: Part, reason: str) -> Probed:
    verdict = dict(found.verdict)
    if not part.can_be_captured:
        verdict["graphs"] = verdict["graphs"] or f"plain torch computes {part.name}"
    if "multiply" in part.fields:
        verdict["fp8_products"] = reason
    return replace(found, verdict=verdict, unfit={**found.unfit, part.name: reason})


def fields_off(found: Probed) -> list[str]:
    """Return the fields of `Kernels` that plain torch replaces."""
    return [name for part in PARTS.values() if part.name in found.unfit for name in part.fields]
