"""gpt-oss: sinks, and experts whose matrices have their columns before their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import Change
from oaiserve.engine.model.families.gguf_metadata import Fields, Metadata
from oaiserve.engine.model.families.small_sizes import EXPERTS


def _fields(metadata: Metadata) -> Fields:
    rope: Fields = {"rope_type": "default", "rope_theta": metadata["rope.freq_base"]}
    if (factor := metadata.get("rope.scaling.factor")) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata["rope.scaling.original_context_length"],
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
        }
    return {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": metadata["attention.key_length"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "sliding_window": metadata["attention.sliding_window"],
        "intermediate_size": metadata.get("expert_feed_forward_length") or metadata["feed_forward_length"],
        "rope_parameters": rope,
    }


def _columns_first(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of gpt-oss' experts: columns before rows, and rows of gates and ups in turns."""
    in_turns = torch.stack(list(tensors), dim=2).flatten(1, 2)
    return in_turns.mT if in_turns.dim() == 3 else in_turns


FAMILIES = (
    Family(
        type="gpt_oss",
        architectures={"gpt-oss": _fields},
        changes=(Change(r"\.experts\.", joined=_columns_first),),
        tensors=((r"\.sinks$", (("attn_sinks.weight",),)),),
        small=EXPERTS,
    ),
)
