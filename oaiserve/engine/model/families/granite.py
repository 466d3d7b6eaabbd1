"""Granite: factors of embedding, residual and logits; without and with experts, and as a hybrid of Mamba 2."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family, Tensors
from oaiserve.engine.model.families.gguf_changes import RATES, TURNED

_TENSORS: Tensors = (
    (r"block_sparse_moe\.router\.weight$", (("ffn_gate_inp.weight",),)),
    (
        r"shared_mlp\.input_linear\.weight$",
        (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), ("ffn_gate.weight", "ffn_up.weight")),
    ),
    (r"shared_mlp\.output_linear\.weight$", (("ffn_down_shexp.weight",), ("ffn_down.weight",))),
)


FAMILIES = (
    Family(type="granite", changes=(TURNED,)),
    Family(
        type="granitemoe",
        changes=(TURNED,),
        tensors=_TENSORS,
    ),
    Family(type="granitemoeshared", changes=(TURNED,), tensors=_TENSORS),
    Family(
        type="granitemoehybrid",
        changes=(TURNED, RATES),
        tensors=_TENSORS,
    ),
)
