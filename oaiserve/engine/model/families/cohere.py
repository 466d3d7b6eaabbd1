"""Command R of Cohere: parallel attention and MLP; in the second version, only windows rotate."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import no_fields

FAMILIES = (
    Family(
        type="cohere",
        architectures={"command-r": lambda metadata: {"use_qk_norm": metadata.has("attn_q_norm")}},
        changes=(),
    ),
    Family(type="cohere2", architectures={"cohere2": no_fields}, changes=(), rotates_in_windows=True),
)
