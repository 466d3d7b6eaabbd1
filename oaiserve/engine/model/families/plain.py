"""Families with only a row, such as the changes of a GGUF file's conversion."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED

FAMILIES = (
    Family(type="arcee", changes=(TURNED,)),
    Family(type="dots1", changes=()),
    Family(type="cohere", changes=()),
    Family(type="cohere2", changes=()),
    Family(type="hunyuan_v1_dense", changes=()),
    Family(type="hunyuan_v1_moe", changes=()),
    Family(type="minimax_m2", changes=()),
    Family(type="phi3", changes=()),
    Family(type="seed_oss", changes=()),
    Family(type="smollm3", changes=(TURNED,)),
    Family(type="starcoder2", changes=()),
    Family(type="ernie4_5", changes=()),
    Family(type="ernie4_5_moe", changes=()),
    Family(type="exaone4", changes=()),
    Family(type="glm4", changes=()),
    Family(type="glm4_moe", changes=()),
    Family(type="olmo", changes=(TURNED,)),
    Family(type="olmo2", changes=()),
    Family(type="olmo3", changes=()),
    Family(type="olmoe", changes=()),
    Family(type="stablelm", changes=()),
)
