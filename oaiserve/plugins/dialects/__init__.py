"""The dialects of model families, in one file for a family or for several that are alike. A file here is all that a
dialect needs.

Each `CallFamily` of a file counts. A chat template belongs to the first family whose signs it has: those with a lower
rank come first, then those with more signs, then those earlier in their file.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin

if TYPE_CHECKING:
    from oaiserve.routes.dialects.family import CallFamily


@cache
def families() -> tuple[CallFamily, ...]:
    """Return the families of all files. Their imports take a while, so a server without tools doesn't call this."""
    from oaiserve.routes.dialects.family import CallFamily

    modules = [import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, CallFamily)]
    in_files = {id(family): family for family in found}.values()  # A file may import another's.
    return tuple(sorted(in_files, key=lambda family: (family.rank, -len(family.signs))))


plugin = Plugin(name="dialects", dialects=families)
