"""MPT: attention with the biases of ALiBi, which it computes by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed, attend, no_biases, slopes_of


def _attention(module: Any, model: Any, handed: Handed) -> bool:
    build = type(model.transformer).build_mpt_alibi_tensor
    slopes = slopes_of(build(model.transformer, module.n_heads, 2), model)
    model.transformer.build_mpt_alibi_tensor = no_biases

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        together = module.Wqkv(hidden_states)
        if module.clip_qkv:
            together = together.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = (
            part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in together.chunk(3, dim=2)
        )
        out = attend(module, handed, query, key, value, scaling=module.softmax_scale, slopes=slopes)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward
    return True


_SMALL = {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}
FAMILIES = (Family(type="mpt", attention={"MptAttention": _attention}, computes_attention=True, small=_SMALL),)
