"""GPT-Neo: attention that it computes by itself, in every second layer within a window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed, attend


def _attention(module: Any, model: Any, handed: Handed) -> bool:
    window = model.config.window_size if module.attention_type == "local" else None
    module.layer_idx = module.layer_id

    def own(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        out = attend(module, handed, query, key, value, scaling=1.0, sliding_window=window)
        return out.transpose(1, 2), None

    module._attn = own
    return True


_TYPES = [[["global", "local", "local"], 1]]
_SMALL = {"num_layers": 3, "num_heads": 4, "window_size": 6, "attention_types": _TYPES}
FAMILIES = (
    Family(type="gpt_neo", attention={"GPTNeoSelfAttention": _attention}, computes_attention=True, small=_SMALL),
)
