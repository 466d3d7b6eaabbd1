"""Families with only a row: the metadata of a GGUF file, and the changes of its conversion."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED
from oaiserve.engine.model.families.gguf_metadata import no_fields
from oaiserve.engine.model.families.small_sizes import EXPERTS, GROUPED_EXPERTS, HEADS_FOR_EACH

_SMALL = {
    **GROUPED_EXPERTS, **HEADS_FOR_EACH, "num_experts": 4, "num_shared_experts": 1,
}  # fmt: skip
FAMILIES = (
    Family(
        type="apertus",
        architectures={"apertus": no_fields},
        changes=(),
        in_metadata=(r"\.layers\.(\d+)\..*\.act_fn\.(\w+)$", "xielu."),
    ),
    Family(type="arcee", architectures={"arcee": no_fields}, changes=(TURNED,)),
    Family(
        type="dots1",
        architectures={
            "dots1": lambda metadata: {
                "norm_topk_prob": metadata.get("expert_weights_norm", False),
                "sliding_window": None,
            }
        },
        changes=(),
        small=_SMALL,
    ),
    Family(type="minimax_m2", architectures={"minimax-m2": no_fields}, changes=(), small=EXPERTS),
    Family(type="phi3", weights_by_transformers=True, changes=()),
    Family(type="seed_oss", architectures={"seed_oss": no_fields}, changes=()),
    Family(type="smollm3", architectures={"smollm3": no_fields}, changes=(TURNED,)),
    Family(type="starcoder2", architectures={"starcoder2": no_fields}, changes=()),
    Family(
        type="doge",
        not_split="transformers' plan for models of type 'doge' gives a part the keys of its own heads, and the masks "
        "of all",
    ),
)
