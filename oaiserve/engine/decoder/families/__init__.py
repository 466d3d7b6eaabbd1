"""The families of models. Similar ones share a file. New files are imported automatically. Plug-ins may add others."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module

from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import ALIKE, Settings, table

FAMILIES: dict[str, Family] = {}


def add_families(families: Iterable[Family]) -> None:
    """Register families. Raises ValueError if a type is already registered or its settings are unknown."""
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


for module in pkgutil.iter_modules(__path__):
    add_families(getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ()))


def family_of(settings: Settings) -> Family | None:
    """Return the family of a model with these settings, or None for a type without one."""
    return FAMILIES.get(settings.stated["model_type"])
