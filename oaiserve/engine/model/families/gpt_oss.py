"""gpt-oss: sinks, and experts whose matrices have their columns before their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import Change


def _columns_first(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of gpt-oss' experts: columns before rows, and rows of gates and ups in turns."""
    in_turns = torch.stack(list(tensors), dim=2).flatten(1, 2)
    return in_turns.mT if in_turns.dim() == 3 else in_turns


FAMILIES = (
    Family(
        type="gpt_oss",
        changes=(Change(r"\.experts\.", joined=_columns_first),),
        tensors=((r"\.sinks$", (("attn_sinks.weight",),)),),
    ),
)
