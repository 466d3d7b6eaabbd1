"""Brings paged attention to families whose code does not hand its arguments on, or computes attention by itself.

Layers that take their keys and values from another one share its cache. Whether a model then computes the same is
checked when it is loaded, as for all families.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.families.own_attention import Handed


def bring_paged_attention(model: PreTrainedModel) -> bool:
    """Change the attention modules of a model where its family needs it.

    Return whether the model computes attention by itself, without an attention function of transformers.
    """
    handed, family = Handed(), family_of(model.config.model_type)
    changed = [
        family.attention[name](module, model, handed)
        for module in model.modules()
        if (name := type(module).__name__) in family.attention
    ]
    if any(changed):
        handed.take_from(model)
    return family.computes_attention


def share_caches(model: PreTrainedModel) -> int:
    """Let layers with keys and values of another layer use its cache. Return their number."""
    stored: dict[str, int] = {}  # the layer that others take from, by their type
    num_sharing = 0
    for module in model.modules():
        of_layer: Any = module
        if getattr(module, "store_full_length_kv", False):
            stored[of_layer.layer_type] = of_layer.layer_idx
        elif getattr(module, "is_kv_shared_layer", False):
            of_layer.layer_idx = stored[of_layer.layer_type]
            num_sharing += 1
    return num_sharing
