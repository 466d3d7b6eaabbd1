"""The families of models. Similar ones share a file. A new file is imported automatically."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from oaiserve.engine.decoder.families.family import Family

FAMILIES: dict[str, Family] = {
    family.type: family
    for module in pkgutil.iter_modules(__path__)
    for family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ())
}
