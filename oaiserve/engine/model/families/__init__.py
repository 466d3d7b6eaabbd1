"""The families of models, each in a file, maybe beside others like it. A new file is found by itself."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES
from oaiserve.engine.model.families.family import Family
from oaiserve.files.gguf import READ_BY_TRANSFORMERS

FAMILIES: dict[str, Family] = {
    family.type: family
    for module in pkgutil.iter_modules(__path__)
    for family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ())
}
# By the architecture that a GGUF file names.
BY_ARCHITECTURE = {
    name: architecture for name, architecture in ARCHITECTURES.items() if name not in READ_BY_TRANSFORMERS
} | {
    name: Architecture(name=name, type=family.type, fields=fields)
    for family in FAMILIES.values()
    for name, fields in family.architectures.items()
}


def family_of(model_type: str) -> Family:
    """Return the facts of one of transformers' types, which may be none."""
    return FAMILIES.get(model_type) or Family(type=model_type)
