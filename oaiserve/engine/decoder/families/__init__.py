"""The families of models. Similar ones share a file. A new file is imported automatically, and plug-ins add others."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings

FAMILIES: dict[str, Family] = {
    family.type: family
    for module in pkgutil.iter_modules(__path__)
    for family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ())
}


def family_of(settings: Settings) -> Family | None:
    """Return the family of a model with these settings, or None for a type without one."""
    return FAMILIES.get(settings.stated["model_type"]) or FAMILIES.get(settings["model_type"])
