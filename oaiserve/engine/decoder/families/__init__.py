"""The families of models. Similar ones share a file. A new file is imported automatically, and plug-ins add others."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import ALIKE, Settings

FAMILIES: dict[str, Family] = {
    family.type: family
    for module in pkgutil.iter_modules(__path__)
    for family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ())
}
ALIKE.update({family.type: family.like for family in FAMILIES.values() if family.like})


def family_of(settings: Settings) -> Family | None:
    """Return the family of a model with these settings, or None for a type without one."""
    return FAMILIES.get(settings.stated["model_type"])
