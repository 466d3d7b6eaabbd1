"""Reads the configurations and tensors of encoders for embeddings and scores from GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping

import gguf
from torch import Tensor

from oaiserve.checkpoints.gguf import GgufHead
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.file import GgufFile
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, windows

# The package gguf lacks these tensors of a layer of Nomic's BERT.
_OTHERS = {
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    **{f"self_attn.{part}_proj": "attn_qkv" for part in "qkv"},
}


def _bert(metadata: Metadata) -> Fields:
    types = metadata.shape(r"^token_types\.weight$")
    positions = metadata.shape(r"^position_embd\.weight$")
    fields = {"type_vocab_size": 1 if types is None else types[0], "hidden_act": "gelu"}
    return fields if positions is None else fields | {"max_position_embeddings": positions[0]}


def _jina_bert(metadata: Metadata) -> Fields:
    """Read the fields of BERT, and the names of the parts of its layers, which differ between files."""
    start = "blk.0."
    parts = {name.removeprefix(start).rpartition(".")[0] for name in metadata.tensors if name.startswith(start)}
    widened = metadata.shape(r"^blk\.0\.ffn_up\.weight$")
    is_fused = widened is not None and widened[0] != metadata["feed_forward_length"]
    return _bert(metadata) | {"layer_parts": sorted(parts), "gates_are_in_ups": is_fused, "use_alibi": True}


def _nomic_bert(metadata: Metadata) -> Fields:
    return {"type_vocab_size": (metadata.shape(r"^token_types\.weight$") or (1,))[0]}


def _modern_bert(metadata: Metadata) -> Fields:
    act = metadata.get("hidden_act", "gelu")
    theta = metadata.get("rope.freq_base", 160000.0)
    every = metadata.get("attention.sliding_window_pattern", 3)
    layers = windows(metadata) or {
        "layer_types": [
            "sliding_attention" if layer % every else "full_attention" for layer in range(metadata.num_layers)
        ]
    }
    return layers | {
        "norm_eps": metadata["attention.layer_norm_epsilon"],
        "hidden_activation": act,
        # This is the number of tokens on each side; the file has that of both sides.
        "sliding_window": metadata.get("attention.sliding_window", 2 * metadata["context_length"]) // 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", theta)},
        },
        "cls_token_id": metadata.token("bos"),
        "sep_token_id": metadata.token("eos"),
    }


ENCODERS = {
    one.name: one
    for one in (
        Architecture(name="bert", type="bert", fields=_bert),
        Architecture(name="jina-bert-v2", type="bert", fields=_jina_bert),
        Architecture(name="nomic-bert", type="nomic_bert", fields=_nomic_bert),
        Architecture(name="modern-bert", type="modernbert", fields=_modern_bert),
    )
}


def encoder_tensors(
    head: GgufHead, architecture: str, parameters: Mapping[str, Tensor], num_layers: int, heads: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the parameters of an encoder that its file has, expanded.

    Raises NotKnown for a tensor of no parameter, unless its name begins with one of `heads`.
    """
    file = GgufFile(head)
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, num_layers)
    unknown = {name for name in file.tensors if not name.startswith(heads)}
    found = {}
    for parameter, model in parameters.items():
        name = _name_in_file(parameter, names, file)
        if name is None:
            continue
        unknown.discard(name)
        tensor = file.expanded(file.tensors[name])
        if ".attn_qkv." in name and (part := re.search(r"\.([qkv])_proj\.", parameter)):
            tensor = tensor.chunk(3)["qkv".index(part[1])]
        found[parameter] = tensor.reshape(model.shape) if tensor.numel() == model.numel() else tensor
    if unknown:
        raise NotKnown(f"it has a tensor '{min(unknown)[:100]}', which is not known")
    return found


def _name_in_file(parameter: str, names: gguf.TensorNameMap, file: GgufFile) -> str | None:
    module, _, last = parameter.rpartition(".")
    if (layer := re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", module)) and layer[2] in _OTHERS:
        name = f"blk.{layer[1]}.{_OTHERS[layer[2]]}.{last}"
        if name in file.tensors:
            return name
    suffixes = (".weight", ".bias")
    found = names.get_name(parameter, suffixes) or names.get_name(f"model.{parameter}", suffixes)
    choices = [] if found is None else [found, f"{found}.weight", f"{found}.bias"]
    return next((name for name in choices if name in file.tensors), None)
