"""The architectures of GGUF files, several in a file. A new file is found by itself."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from oaiserve.engine.decoder.sources.gguf.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for module in pkgutil.iter_modules(__path__)
    for architecture in getattr(import_module(f"{__name__}.{module.name}"), "ARCHITECTURES", ())
}
