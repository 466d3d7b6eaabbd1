"""Reads embedding models and rerankers from GGUF files, which name their pooling and have the layers after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.gguf import GgufHead, architecture
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.sources.gguf.file import GgufFile
from oaiserve.engine.model.transformers_files.empty_model import empty_model, named_parameters
from oaiserve.engine.model.transformers_files.gguf_encoders import ENCODERS
from oaiserve.engine.model.transformers_files.gguf_weights import GgufWeights, scale_frequencies
from oaiserve.engine.types.pooling import GGUF_MODES, GGUF_RANK, Task, has_score
from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model.heads import Head, pool
from oaiserve.plugins.pooling.model.jina_bert import JinaBert

_HEADS = ("cls.", "dense_", "output.weight")  # beginnings of the names of tensors after the layers
# The package gguf lacks these tensors of a layer of Nomic's BERT.
_OTHERS = {
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    **{f"self_attn.{part}_proj": "attn_qkv" for part in "qkv"},
}


class GgufPooler(NamedTuple):
    """The layers of a model, and the modules after them."""

    model: PreTrainedModel
    mode: str | None  # mode of pooling, or None if the file names none
    dense: list[Module]  # layers after the pooling
    score_head: Head | None  # the head of a reranker
    gives_probabilities: bool  # Scores are probabilities already.
    pair_template: str  # see `Pooling`


def load_gguf_pooler(head: GgufHead, config: PreTrainedConfig, dtype: torch.dtype, task: Task) -> GgufPooler:
    """Load and expand the weights of a file. The task decides what a reranker is for whose pooling the file doesn't
    name. Raises StartupError for a file that lacks some weights."""
    path = head.paths[0]
    values = head.values
    name = architecture(values)
    is_jina = name == "jina-bert-v2"
    model: Any = empty_model(config, dtype, JinaBert._from_config if is_jina else AutoModel.from_config)
    if hasattr(model, "pooler"):
        model.pooler = None  # Files have no pooler.
    parameters = named_parameters(model)
    rope_factors = None
    try:
        if name in ENCODERS:
            expanded = _encoder_tensors(head, name, parameters, config.num_hidden_layers, _HEADS)
            tensors = {key: tensor.to(dtype) for key, tensor in expanded.items()}
        else:
            weights = GgufWeights(head, parameters, _HEADS)
            tensors = {key: weights.tensor(key).to(dtype) for key in weights.names()}
            rope_factors = weights.rope_factors
        file = GgufFile(head)
        heads = {key: file.expanded(one).float() for key, one in file.tensors.items() if key.startswith(_HEADS)}
    except NotKnown as error:
        raise StartupError(f"'{path}' cannot be used: {error}.") from error
    for key, parameter in model.state_dict().items():
        if key not in tensors and (key.endswith(".bias") or "token_type" in key):  # They count as zeros.
            tensors[key] = torch.zeros(parameter.shape, dtype=dtype)
    missing = sorted(model.state_dict().keys() - tensors.keys())
    if missing:
        raise StartupError(f"'{path}' has no weights for {len(missing)} tensors of its model, such as {missing[0]}.")
    model.load_state_dict(tensors, assign=True)
    scale_frequencies(model, rope_factors)
    dense = [_dense(heads[key]) for key in ("dense_2.weight", "dense_3.weight") if key in heads]
    kind = values.get(f"{name}.pooling_type")
    if kind is None and task == "score" and has_score(head):
        kind = GGUF_RANK
    if kind != GGUF_RANK:
        return GgufPooler(model, GGUF_MODES.get(kind or 0), dense, None, gives_probabilities=False, pair_template="")
    is_qwen = config.model_type.startswith("qwen")
    is_modern = name == "modern-bert"
    mode = GGUF_MODES.get(values.get(f"{name}.classifier.pooling_type") or int(is_modern)) or "cls"
    rank_head = _rank_head(heads, "lasttoken" if is_qwen else mode, is_modern=is_modern)
    template = str(head.read_tokenizer().get("tokenizer.chat_template.rerank") or "")
    return GgufPooler(model, mode, dense, rank_head, gives_probabilities=is_qwen, pair_template=template)


def _encoder_tensors(
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


def _dense(weight: Tensor) -> Module:
    layer = Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.load_state_dict({"weight": weight})
    return layer.eval()


def _rank_head(heads: dict[str, Tensor], mode: str, *, is_modern: bool) -> Head:
    """Return the head of a reranker: a layer with an activation, and the output. Some files have only the output."""
    middle = heads.get("cls.weight")
    middle_bias = heads.get("cls.bias")
    output = heads.get("cls.output.weight")
    output_bias = heads.get("cls.output.bias")
    middle, output = (one if one is None else one.view(-1, one.shape[-1]) for one in (middle, output))
    if output is None and middle is not None and middle.shape[0] == 1:
        output = middle
        output_bias = middle_bias
        middle = None
    if output is None or output.shape[0] > 2:
        labels = 0 if output is None else output.shape[0]
        raise StartupError(f"Its metadata say that it ranks, but its output has {labels} numbers, not 1 or 2.")

    def logits(hidden: Tensor, lengths: list[int]) -> Tensor:
        def on_device(tensor: Tensor | None) -> Any:
            if tensor is None:
                return None
            return tensor.to(hidden.device)

        states = pool(hidden, lengths, mode).float()
        if middle is not None:
            states = linear(states, on_device(middle), on_device(middle_bias))
            states = gelu(states) if is_modern else states.tanh()
            if (norm := on_device(heads.get("cls.norm.weight"))) is not None:
                states = layer_norm(states, norm.shape, norm)
        scores = linear(states, on_device(output), on_device(output_bias))
        return scores.softmax(-1)[:, :1] if scores.shape[1] == 2 else scores  # the probability of "yes"

    return logits
