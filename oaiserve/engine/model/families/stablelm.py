"""StableLM: layers that drop the arguments of attention."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata
from oaiserve.engine.model.families.own_attention import hand_over
from oaiserve.engine.model.families.small_sizes import HEADS_FOR_EACH


def _fields(metadata: Metadata) -> Fields:
    return {
        "use_qkv_bias": metadata.has(r"attn_q\.bias$"),
        "qk_layernorm": metadata.has("attn_q_norm"),
        "use_parallel_residual": metadata.get("use_parallel_residual", False),
        "partial_rotary_factor": metadata["rope.dimension_count"] / metadata.head_dim,
    }


FAMILIES = (
    Family(
        type="stablelm",
        architectures={"stablelm": _fields},
        changes=(),
        attention={"StableLmAttention": hand_over},
        small=HEADS_FOR_EACH,
    ),
)
