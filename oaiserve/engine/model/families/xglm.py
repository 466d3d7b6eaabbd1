"""XGLM: attention that it computes by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed, attend


def _attention(module: Any, _: Any, handed: Handed) -> bool:
    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = (
            project(hidden_states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        out = attend(module, handed, query, key, value, scaling=module.scaling)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward
    return True


FAMILIES = (Family(type="xglm", attention={"XGLMAttention": _attention}, computes_attention=True),)
