"""GPT-J and CodeGen: attention that they compute by themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed, attend


def _attention(module: Any, _: Any, handed: Handed) -> bool:
    def own(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        out = attend(module, handed, query.to(value.dtype), key.to(value.dtype), value)
        return out.transpose(1, 2), None

    module._attn = own
    return True


_SMALL = {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}
FAMILIES = (
    Family(type="gptj", attention={"GPTJAttention": _attention}, computes_attention=True, small=_SMALL),
    Family(
        type="codegen",
        attention={"CodeGenAttention": _attention},
        computes_attention=True,
        projection_groups=4,
        small=_SMALL,
    ),
)
