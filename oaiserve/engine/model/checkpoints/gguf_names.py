"""Knows what parameters of transformers' models are called in GGUF files, and what llama.cpp's conversion changes.

The package gguf has the names that most parameters have. Here are those that it does not know, because they consist of
several tensors of a file, or are new; and, for each family, the changes of its conversion, which are undone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

Order = NDArray[np.int64]
# What is undone in each number.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "one added": lambda numbers: numbers - 1,
    "minus exp": lambda numbers: (-numbers).log(),
}


class Change(NamedTuple):
    """A change of the conversion is undone in the parameters whose names have a pattern."""

    pattern: str
    # Which rows of the file, those of its tensors one behind the other, are the rows of the parameter.
    rows: Callable[[PreTrainedConfig, str], Order] | None = None
    columns: Callable[[PreTrainedConfig], Order] | None = None  # which columns of the file are those of the parameter
    values: str | None = None  # one of VALUES
    # Makes a parameter that no order of rows makes of the tensors of the file, in float32.
    joined: Callable[[PreTrainedConfig, str, Sequence[Tensor]], Tensor] | None = None


def _halves(config: PreTrainedConfig, name: str) -> Order:
    """Return the rows of heads whose file has the pairs that are rotated together as neighbours, and not as halves."""
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return np.arange(heads * head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _by_key_head(config: Any, name: str) -> Order:
    """Return the rows of Qwen3-Next's projections, sorted by key head: its query, its key, its values, their gates."""
    heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim // heads
    sizes = [heads * key_dim, heads * key_dim, heads * values, heads * values]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).reshape(-1)


def _grouped(config: Any, width: int) -> Order:
    """Return `width` numbers of each value head in transformers' order, in which those of a key head are neighbours. In
    a file, the first values of all key heads come first."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return np.arange(values * width).reshape(values // keys, keys, width).swapaxes(0, 1).reshape(-1)


def _grouped_heads(config: Any, name: str) -> Order:
    return _grouped(config, 1)


def _grouped_values(config: Any, name: str = "") -> Order:
    return _grouped(config, config.linear_value_head_dim)


def _grouped_behind_keys(config: Any, name: str) -> Order:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([np.arange(before), before + _grouped_values(config)])


def _of_latent(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return what makes keys and values of latent vectors, of which most files have two tensors with a matrix for each
    head, that of keys the other way round."""
    if len(tensors) == 1:
        return tensors[0]
    keys, values = tensors
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


def _one_of_stacked(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the matrix of a parameter's own number, of those that a file has as one tensor."""
    return tensors[0][int(name.split(".")[-2])]


def _columns_first(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return what gpt-oss has of its experts: columns before rows, and the rows of gates and of up projections in
    turns."""
    in_turns = torch.stack(list(tensors), dim=2).flatten(1, 2)
    return in_turns.mT if in_turns.dim() == 3 else in_turns


_TURNED = Change(r"\.[qk]_proj\.", rows=_halves)
_NORMS_ADD_ONE = Change(r"norm\w*\.weight$", values="one added")
_RATES = Change(r"A_log$", values="minus exp")
_DELTA = (
    Change(r"linear_attn\.norm\.weight$"),  # the one norm that is as it was
    _NORMS_ADD_ONE,
)
_GROUPED = (
    *_DELTA,
    Change(r"linear_attn\.(in_proj_qkv|conv1d)\.weight$", rows=_grouped_behind_keys),
    Change(r"linear_attn\.in_proj_z\.weight$", rows=_grouped_values),
    Change(r"linear_attn\.(in_proj_[ab]\.weight|dt_bias)$", rows=_grouped_heads),
    Change(r"A_log$", rows=_grouped_heads, values="minus exp"),
    Change(r"linear_attn\.out_proj\.weight$", columns=_grouped_values),
)
_LATENT = (Change(r"kv_b_proj\.weight$", joined=_of_latent),)
# By transformers' type of the model: what is changed. The first pattern that a name has counts.
CHANGES: dict[str, tuple[Change, ...]] = {
    "apertus": (),
    "arcee": (_TURNED,),
    "cohere": (),
    "cohere2": (),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": (),
    "ernie4_5": (),
    "ernie4_5_moe": (),
    "exaone4": (),
    "falcon_h1": (_RATES,),
    "falcon_mamba": (_RATES,),
    "gemma": (_NORMS_ADD_ONE,),
    "gemma2": (_NORMS_ADD_ONE,),
    "gemma3_text": (_NORMS_ADD_ONE,),
    "gemma4_text": (),
    "gemma3n_text": (Change(r"altup_(unembed_)?projections\.", joined=_one_of_stacked),),
    "glm4": (),
    "glm4_moe": (),
    "gpt_oss": (Change(r"\.experts\.", joined=_columns_first),),
    "granite": (_TURNED,),
    "granitemoe": (_TURNED,),
    "granitemoehybrid": (_TURNED, _RATES),
    "granitemoeshared": (_TURNED,),
    "hunyuan_v1_dense": (),
    "hunyuan_v1_moe": (),
    "lfm2": (),
    "lfm2_moe": (),
    "llama": (_TURNED,),
    "mamba": (_RATES,),
    "mamba2": (_RATES,),
    "minimax_m2": (),
    "mistral": (_TURNED,),
    "mixtral": (_TURNED,),
    "nemotron": (_NORMS_ADD_ONE,),
    "nemotron_h": (_TURNED, _RATES),
    "olmo": (_TURNED,),
    "olmo2": (),
    "olmo3": (),
    "olmoe": (),
    "phi3": (),
    "qwen2": (),
    "qwen2_moe": (),
    "qwen3": (),
    "qwen3_5_moe_text": _GROUPED,
    "qwen3_5_text": _GROUPED,
    "qwen3_moe": (),
    "qwen3_next": (*_DELTA, Change(r"in_proj_qkvz\.weight$", rows=_by_key_head), _RATES),
    "seed_oss": (),
    "smollm3": (_TURNED,),
    "stablelm": (),
    "starcoder2": (),
}
# Parameters that the package gguf does not know: a pattern of their names, and what files may have for them, the first
# that is there. A layer's own name begins with `blk.` and its number.
_NAMES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (r"experts\.gate_up_proj$", (("ffn_gate_exps.weight", "ffn_up_exps.weight"), ("ffn_gate_up_exps.weight",))),
    (r"experts\.gate_up_proj_bias$", (("ffn_gate_exps.bias", "ffn_up_exps.bias"),)),
    (r"experts\.up_proj$", (("ffn_up_exps.weight",),)),
    (r"experts\.down_proj$", (("ffn_down_exps.weight",),)),
    (r"experts\.down_proj_bias$", (("ffn_down_exps.bias",),)),
    (r"(e_score_correction_bias|expert_bias)$", (("exp_probs_b.bias",), ("exp_probs_b",))),
    (r"block_sparse_moe\.router\.weight$", (("ffn_gate_inp.weight",),)),
    (
        r"shared_mlp\.input_linear\.weight$",
        (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), ("ffn_gate.weight", "ffn_up.weight")),
    ),
    (r"shared_mlp\.output_linear\.weight$", (("ffn_down_shexp.weight",), ("ffn_down.weight",))),
    (r"kv_b_proj\.weight$", (("attn_k_b.weight", "attn_v_b.weight"), ("attn_kv_b.weight",))),
    (r"in_proj_qkvz\.weight$", (("attn_qkv.weight", "attn_gate.weight"),)),
    (r"router\.scale$", (("ffn_gate_inp.scale",),)),
    (r"router\.per_expert_scale$", (("ffn_down_exps.scale",),)),
    (r"\.dt_bias$", (("ssm_dt.bias",),)),
    (r"\.sinks$", (("attn_sinks.weight",),)),
    (r"correct_output_scale$", (("altup_correct_scale.weight",),)),
    (r"altup_projections\.\d+\.weight$", (("altup_proj.weight",),)),
    (r"altup_unembed_projections\.\d+\.weight$", (("altup_unembd_proj.weight",),)),
)


def change_of(config: PreTrainedConfig, name: str) -> Change | None:
    """Return what is changed in a parameter, or None if it is in the file as it is."""
    found = next((change for change in CHANGES[config.model_type] if re.search(change.pattern, name)), None)
    return None if found is None or not any(found[1:]) else found


class FileNames:
    """The names that the parameters of a model have in its file."""

    def __init__(self, architecture: str, num_layers: int, tensors: Container[str]) -> None:
        """Raises KeyError for an architecture that the installed package gguf does not know."""
        import gguf  # only a first start needs it

        number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
        self._names, self._tensors = gguf.get_tensor_name_map(number, num_layers), tensors

    def of(self, parameter: str) -> tuple[str, ...] | None:
        """Return the tensors that a parameter is, or None if they are not in the file."""
        layer = re.search(r"\.layers\.(\d+)\.", parameter)
        start = "" if layer is None else f"blk.{layer[1]}."
        for pattern, choices in _NAMES:
            if re.search(pattern, parameter):
                for choice in choices:
                    if all(f"{start}{name}" in self._tensors for name in choice):
                        return tuple(f"{start}{name}" for name in choice)
        # Nemotron H's names begin differently in its published checkpoints, whose names the package has.
        for name in (parameter, re.sub("^model", "backbone", parameter)):
            found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
            for suffix in ("", ".weight", ".bias"):
                if found is not None and f"{found}{suffix}" in self._tensors:
                    return (f"{found}{suffix}",)
        return None
