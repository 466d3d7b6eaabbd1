"""The names of a model's parameters in its GGUF file, and the change of each by llama.cpp's conversion.

The package gguf has the names that most parameters have. Others consist of several tensors of a file, or are new: those
of several families are here, and the rest with their family.
"""

from __future__ import annotations

import re
from collections.abc import Container

from transformers import PreTrainedConfig

from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.families.family import Family, Tensors
from oaiserve.engine.model.families.gguf_changes import Change

_TENSORS: Tensors = (
    (r"experts\.gate_up_proj$", (("ffn_gate_exps.weight", "ffn_up_exps.weight"), ("ffn_gate_up_exps.weight",))),
    (r"experts\.gate_up_proj_bias$", (("ffn_gate_exps.bias", "ffn_up_exps.bias"),)),
    (r"experts\.up_proj$", (("ffn_up_exps.weight",),)),
    (r"experts\.down_proj$", (("ffn_down_exps.weight",),)),
    (r"experts\.down_proj_bias$", (("ffn_down_exps.bias",),)),
    (r"(e_score_correction_bias|expert_bias)$", (("exp_probs_b.bias",), ("exp_probs_b",))),
    (r"\.dt_bias$", (("ssm_dt.bias",),)),
)


def change_of(config: PreTrainedConfig, name: str) -> Change | None:
    """Return the change of a parameter, or None if it is in the file as it is."""
    changes = family_of(config.model_type).changes or ()
    found = next((change for change in changes if re.search(change.pattern, name)), None)
    return None if found is None or not any(found[1:]) else found


class FileNames:
    """The names of a model's parameters in its file."""

    def __init__(self, family: Family, architecture: str, num_layers: int, tensors: Container[str]) -> None:
        """Raises KeyError for an architecture unknown to the installed package gguf."""
        import gguf  # only a first start needs it

        number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
        self._names, self._tensors = gguf.get_tensor_name_map(number, num_layers), tensors
        self._family = family

    def of(self, parameter: str) -> tuple[str, ...] | None:
        """Return the tensors of a parameter, or None if they are not in the file."""
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", parameter)
        start = "" if layer is None else f"blk.{layer[1]}."
        for pattern, choices in (*self._family.tensors, *_TENSORS):
            if re.search(pattern, parameter):
                for choice in choices:
                    if all(f"{start}{name}" in self._tensors for name in choice):
                        return tuple(f"{start}{name}" for name in choice)
        suffixes = (".weight", ".bias")
        found = self._names.get_name(parameter, suffixes) or self._names.get_name(f"model.{parameter}", suffixes)
        for suffix in ("", ".weight", ".bias"):
            if found is not None and f"{found}{suffix}" in self._tensors:
                return (f"{found}{suffix}",)
        return None
