"""EXAONE 4, without and with experts: only windows rotate."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, windows
from oaiserve.engine.model.families.small_sizes import WITH_SHARED_EXPERT


def _fields(metadata: Metadata) -> Fields:
    slides = metadata.get("attention.sliding_window")
    return {"sliding_window": slides} | (
        windows(metadata) if slides else {"layer_types": ["full_attention"] * metadata.num_layers}
    )


FAMILIES = (
    Family(type="exaone4", architectures={"exaone4": _fields}, changes=(), rotates_in_windows=True),
    Family(type="exaone_moe", rotates_in_windows=True, small=WITH_SHARED_EXPERT),
)
