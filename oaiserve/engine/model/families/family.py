"""The facts that set a family of models apart: one value for each of transformers' model types.

A type without facts of its own needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oaiserve.engine.model.families.gguf_changes import Change

if TYPE_CHECKING:
    from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata

# The tensors of a file that are a parameter, by a pattern of its name: several choices, of which the first counts that
# is there. The name of a layer's tensor begins with `blk.` and its number.
Tensors = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    type: str  # transformers' name of it

    # -- its GGUF files
    # Of an encoder, by the name that files have for it: the configuration's fields beside the common ones.
    architectures: Mapping[str, Callable[[Metadata], Fields]] = field(default_factory=dict)
    changes: tuple[Change, ...] | None = None  # of llama.cpp's conversion, which are undone; None: they are not known
    tensors: Tensors = ()  # those that the package gguf does not know
    has_rope_factors: bool = True  # those in a file are not in the configuration
