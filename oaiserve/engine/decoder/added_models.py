"""Adds the model families and GGUF architectures of plug-ins to those that are known."""

from __future__ import annotations

from collections.abc import Iterable

from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import ALIKE, table
from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES


def add_families(families: Iterable[Family]) -> None:
    """Add families. Raises ValueError for one that there is already, or whose settings are not known."""
    for family in families:
        if FAMILIES.get(family.type, family) != family:
            raise ValueError(f"there is a family '{family.type}' already")
        types = table()["types"]
        if family.type not in types:
            if family.like not in types:
                raise ValueError(
                    f"the family '{family.type}' has `like='{family.like}'`, which is not a known type. Name the type "
                    "whose settings its config.json has, such as 'llama'"
                )
            ALIKE[family.type] = family.like
        FAMILIES[family.type] = family


def add_architectures(architectures: Iterable[Architecture]) -> None:
    """Add GGUF architectures. Raises ValueError for one that there is already, or whose family is not known."""
    for architecture in architectures:
        if ARCHITECTURES.get(architecture.name, architecture) != architecture:
            raise ValueError(f"there is a GGUF architecture '{architecture.name}' already")
        if architecture.type not in FAMILIES:
            raise ValueError(
                f"the GGUF architecture '{architecture.name}' has the type '{architecture.type}', which no family has"
            )
        ARCHITECTURES[architecture.name] = architecture
