"""The architectures of GGUF files. New files here are imported automatically, and plug-ins may add others."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module

from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.sources.gguf.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {}


def add_architectures(architectures: Iterable[Architecture]) -> None:
    """Add GGUF architectures. Raises ValueError for one that already exists, or whose family is unknown."""
    for architecture in architectures:
        if ARCHITECTURES.get(architecture.name, architecture) != architecture:
            raise ValueError(f"there is a GGUF architecture '{architecture.name}' already")
        if architecture.type not in FAMILIES:
            raise ValueError(
                f"the GGUF architecture '{architecture.name}' has the type '{architecture.type}', which no family has"
            )
        ARCHITECTURES[architecture.name] = architecture


for module in pkgutil.iter_modules(__path__):
    add_architectures(getattr(import_module(f"{__name__}.{module.name}"), "ARCHITECTURES", ()))
