"""OLMo 1 to 3, with experts, and as a hybrid of delta nets."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata, windows
from oaiserve.engine.model.families.small_sizes import DELTA, EXPERTS


def _olmo2(metadata: Metadata) -> Fields:
    if metadata.get("attention.sliding_window") is None:
        return {}
    return {"model_type": "olmo3"} | windows(metadata)


FAMILIES = (
    Family(
        type="olmo",
        architectures={"olmo": lambda metadata: {"clip_qkv": metadata.get("attention.clamp_kqv")}},
        changes=(TURNED,),
    ),
    Family(type="olmo2", architectures={"olmo2": _olmo2}, changes=()),
    Family(type="olmo3", changes=()),
    Family(type="olmoe", architectures={"olmoe": lambda _: {"norm_topk_prob": False}}, changes=(), small=EXPERTS),
    Family(type="olmo_hybrid", mixer="OlmoHybridGatedDeltaNet", small=DELTA),
)
