"""Granite: factors of embedding, residual and logits; without and with experts, and as a hybrid of Mamba 2."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family, Tensors
from oaiserve.engine.model.families.gguf_changes import RATES, TURNED
from oaiserve.engine.model.families.small_sizes import EXPERTS, MAMBA2, STATE_AND_ATTENTION

_TENSORS: Tensors = (
    (r"block_sparse_moe\.router\.weight$", (("ffn_gate_inp.weight",),)),
    (
        r"shared_mlp\.input_linear\.weight$",
        (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), ("ffn_gate.weight", "ffn_up.weight")),
    ),
    (r"shared_mlp\.output_linear\.weight$", (("ffn_down_shexp.weight",), ("ffn_down.weight",))),
)


_SMALL = {
    **MAMBA2, **STATE_AND_ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
}  # fmt: skip
FAMILIES = (
    Family(type="granite", changes=(TURNED,)),
    Family(
        type="granitemoe",
        changes=(TURNED,),
        tensors=_TENSORS,
        small=EXPERTS,
    ),
    Family(
        type="granitemoeshared", changes=(TURNED,), tensors=_TENSORS, small={**EXPERTS, "shared_intermediate_size": 48}
    ),
    Family(
        type="granitemoehybrid",
        changes=(TURNED, RATES),
        tensors=_TENSORS,
        mixer="GraniteMoeHybridMambaLayer",
        small=_SMALL,
    ),
)
