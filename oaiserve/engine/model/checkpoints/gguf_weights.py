"""The tensors of a GGUF file under the names that transformers' models have for them.

Files have other names, and llama.cpp's conversion changes some tensors, which is undone here. What is listed are the
families whose conversion is known; all tensors of a file must have found a place, and all parameters of the model.

The weights of a layer's experts are one tensor in a file. Their gates and their up projections are two, which are
one parameter of the model: one behind the other, or, in gpt-oss, their rows in turns.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from oaiserve.engine.model.checkpoints.weights import Weights
from oaiserve.engine.model.cpu.blocks import FORMATS, Blocks, ExpertBlocks, expand
from oaiserve.engine.model.cpu.stored import PlaceInFile
from oaiserve.gguf import GgufTensor, parts, read_tensors

_FLOAT32, _FLOAT16, _BFLOAT16 = 0, 1, 30  # formats whose numbers torch has a type for
_DTYPES = {_FLOAT32: torch.float32, _FLOAT16: torch.float16, _BFLOAT16: torch.bfloat16}
_ROPE_FACTORS = "rope_freqs.weight"

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
# They decide about much, and are read as numbers to find out what they do.
_NEVER_IN_BLOCKS = re.compile(r"\.mlp\.(gate|router|shared_expert_gate)\.weight")
# Parameters of the model that are no `weight` and no `bias` of a module.
_OF_NO_MODULE = re.compile(r"\.experts\.|\.sinks$")


class _Family(NamedTuple):
    layer: dict[str, str]  # names of a layer's tensors, in the file and in the model
    turns_heads: bool = False  # rows of queries and keys are in the order in which llama.cpp rotates them
    norms_add_one: bool = False  # the file has the weights of norms plus one
    # The model has the columns of experts before their rows, and the rows of gates and of up projections in turns.
    turns_experts: bool = False


_FAMILIES = {
    "llama": _Family(_LAYER, turns_heads=True),
    "mistral": _Family(_LAYER, turns_heads=True),
    "qwen2": _Family(_LAYER),
    "qwen3": _Family(_LAYER),
    "phi3": _Family(_LAYER | _FUSED),
    "mixtral": _Family(_LAYER | _EXPERTS, turns_heads=True),
    "qwen2_moe": _Family(_LAYER | _EXPERTS | _SHARED_EXPERT),
    "qwen3_moe": _Family(_LAYER | _EXPERTS),
    "gpt_oss": _Family(_LAYER | _EXPERTS | _GPT_OSS, turns_experts=True),
    "gemma2": _Family(_LAYER | _NORMS_AFTER, norms_add_one=True),
    "gemma3_text": _Family(_LAYER | _NORMS_AFTER, norms_add_one=True),
}


class NotKept(Exception):
    """The weights of the file cannot stay as they are; the message says why."""


class _MappedFile:
    """A file, or one of several that a model is in."""

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name  # as a record has it
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = np.frombuffer(self.map, np.uint8)


class GgufWeights:
    """The weights of mapped files: matrices in blocks, and all other tensors expanded."""

    def __init__(self, path: Path, config: PreTrainedConfig) -> None:
        """Map the files. Raises BadFile, and NotKept for a family, or a tensor, that is not known."""
        family = _FAMILIES.get(config.model_type)
        if family is None:
            raise NotKept(f"models of type '{config.model_type}' are only known expanded")
        self._family, self._config = family, config
        self._files = [_MappedFile(part) for part in parts(path)]
        tensors = read_tensors(path)
        factors = tensors.pop(_ROPE_FACTORS, None)
        # What the frequencies of rotary embeddings are divided by.
        self.rope_factors = None if factors is None else self._expanded(factors).float()
        # Where a parameter consists of two tensors, that of gates comes first, as it does in the alphabet.
        self._tensors: dict[str, list[GgufTensor]] = {}
        for name in sorted(tensors):
            tensor = tensors[name]
            if "ffn_gate_inp_shexp" in name:  # a matrix of one row
                tensor = tensor._replace(shape=(1, tensor.shape[-1]))
            self._tensors.setdefault(self._model_name(name), []).append(tensor)

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [tensor.shape for tensor in self._tensors[name]]
        if ".experts." not in name or len(shapes[0]) < 2:
            return shapes[0]
        experts, rows, columns = shapes[0][0], sum(shape[1] for shape in shapes), shapes[0][2:]
        return (experts, *columns, rows) if self._family.turns_experts else (experts, rows, *columns)

    def places(self) -> dict[str, PlaceInFile]:
        """Return where the matrices are in the files whose numbers torch has a type for."""
        return {
            name: (self._file_of(tensors[0]).name, tensors[0].begin, _DTYPES[tensors[0].kind], list(tensors[0].shape))
            for name, tensors in self._tensors.items()
            if len(tensors) == 1 and tensors[0].kind in _DTYPES and len(tensors[0].shape) > 1
        }

    def has_blocks(self) -> bool:
        return any(tensor.kind in FORMATS for tensors in self._tensors.values() for tensor in tensors)

    def blocks(self, name: str) -> Blocks | ExpertBlocks | None:
        """Return a matrix, or those of each expert, in blocks, or None for a tensor that has to be expanded."""
        tensors = self._tensors[name]
        if any(tensor.kind not in FORMATS for tensor in tensors) or _NEVER_IN_BLOCKS.search(name):
            return None
        if len(tensors[0].shape) == 3:
            return list(zip(*map(self._by_expert, tensors), strict=True))
        if len(tensors[0].shape) != 2:
            return None
        (tensor,) = tensors
        order = self._order(name, tensor.shape[0])
        return self._blocks(tensor, self._rows(tensor), order, tensor.begin)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor expanded, as the model's code has it."""
        tensors = [self._expanded(tensor) for tensor in self._tensors[name]]
        if self._family.turns_experts and ".experts." in name:
            in_turns = torch.stack(tensors, dim=2).flatten(1, 2)
            return in_turns.mT if in_turns.dim() == 3 else in_turns
        tensor = torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0]
        order = self._order(name, tensor.shape[0])
        tensor = tensor[torch.from_numpy(order)]
        return tensor - 1 if self._family.norms_add_one and "norm" in name else tensor

    def _model_name(self, name: str) -> str:
        found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        names = {} if found is None else _MODEL if found[1] is None else self._family.layer
        if found is None or (inner := names.get(found[2])) is None:
            raise NotKept(f"it has a tensor '{name[:100]}', which is not known")
        layer = "" if found[1] is None else f"model.layers.{int(found[1])}."
        if _OF_NO_MODULE.search(inner):
            return f"{layer}{inner}_bias" if found[3] == "bias" else f"{layer}{inner}"
        return f"{layer}{inner}.{found[3]}"

    def _file_of(self, tensor: GgufTensor) -> _MappedFile:
        return self._files[tensor.part]

    def _bytes(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        return self._file_of(tensor).data[tensor.begin : tensor.end]

    def _rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        return self._bytes(tensor).reshape(math.prod(tensor.shape[:-1]), -1)

    def _blocks(self, tensor: GgufTensor, rows: NDArray[np.uint8], order: NDArray[np.int64], begin: int) -> Blocks:
        file = self._file_of(tensor)
        part = file.name if len(self._files) > 1 else None
        return Blocks(rows, tensor.kind, order, file.map, begin, part=part)

    def _by_expert(self, tensor: GgufTensor) -> list[Blocks]:
        found, (number, n, _) = [], tensor.shape
        for place, rows in enumerate(np.split(self._rows(tensor), number)):
            found.append(self._blocks(tensor, rows, np.arange(n), tensor.begin + place * rows.nbytes))
        return found

    def _expanded(self, tensor: GgufTensor) -> Tensor:
        if tensor.kind in _DTYPES:
            data = torch.from_numpy(np.array(self._bytes(tensor)))
            return data.view(_DTYPES[tensor.kind]).view(tensor.shape)
        try:
            return expand(self._rows(tensor), tensor.kind).view(tensor.shape)
        except NotImplementedError as error:
            raise NotKept(f"its tensor '{tensor.name}' has a format that cannot be expanded") from error

    def _order(self, name: str, num_rows: int) -> NDArray[np.int64]:
        """Return which rows of the file are the rows of the model's tensor."""
        rows = np.arange(num_rows)
        if not self._family.turns_heads or not re.search(r"\.[qk]_proj\.", name):
            return rows
        heads = self._config.num_attention_heads if ".q_proj." in name else self._config.num_key_value_heads
        # The file has the pairs that are rotated together as neighbours, transformers as halves of a head.
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def refuse_unless_whole(weights: Weights, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NotKept unless the file has exactly the parameters of the model, in their shapes."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    if differing := sorted(shapes.keys() ^ weights.names()):
        where = "the model" if differing[0] in shapes else "the file"
        raise NotKept(f"only {where} has a tensor '{differing[0]}'")
    for name, shape in shapes.items():
        if weights.shape(name) != shape:
            raise NotKept(f"its tensor '{name}' has the shape {weights.shape(name)}, and not {shape}")
