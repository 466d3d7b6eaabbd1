"""Llama, Mistral and Mixtral, whose GGUF files transformers reads, and Llama 4."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED

FAMILIES = (
    *(Family(type=name, changes=(TURNED,)) for name in ("llama", "mistral")),
    Family(type="mixtral", changes=(TURNED,)),
)
