"""The dialects of calls, one file for a family or for several that are alike. A file here is all that a dialect needs.

Each `CallFamily` of a file counts. A chat template belongs to the first family whose signs it has: those with a lower
rank come first, then those with more signs, then those earlier in their file.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from oaiserve.config import OptionError
from oaiserve.routes.dialects.family import CallFamily


def _in_files() -> list[CallFamily]:
    modules = [import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)]
    families = [value for module in modules for value in vars(module).values() if isinstance(value, CallFamily)]
    return list({id(family): family for family in families}.values())  # A file may import another's.


FAMILIES = tuple(sorted(_in_files(), key=lambda family: (family.rank, -len(family.signs))))


def check_name(name: str, further: Iterable[CallFamily] = ()) -> None:
    """Raise OptionError unless `--tool-call-parser` can have this value, with `further` families of plug-ins."""
    names = ("auto", "none", *sorted({family.name for family in (*further, *FAMILIES)}))
    if name not in names:
        raise OptionError(f"--tool-call-parser is '{name}', but must be one of {', '.join(names)}.")
