"""An OpenAI-compatible server for language models that accounts for every millisecond of every request.

The public names are imported on first use, so that `import oaiserve` and `oaiserve --help` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine
    from oaiserve.engine.request import Grammar, Request, SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "Grammar", "Request", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": "oaiserve.engine.engine",
    "Grammar": "oaiserve.engine.request",
    "Request": "oaiserve.engine.request",
    "SamplingParams": "oaiserve.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oaiserve' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
