"""Reads the tensors of a GGUF file under transformers' names, with the changes of llama.cpp's conversion undone.

All tensors of a file must find a place, and all parameters. The weights of a layer's experts are one tensor in a file:
gates and ups are two, which are one parameter, one behind the other, or in gpt-oss their rows in turns.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.engine.decoder.blocks import expand
from oaiserve.engine.model.checkpoints.empty_model import empty_model, named_parameters
from oaiserve.engine.model.checkpoints.gguf_names import FileNames, change_of
from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.families.gguf_changes import VALUES
from oaiserve.files.gguf import GgufTensor, architecture, read_tensors, read_values, shard_paths

_FLOAT32, _FLOAT16, _BFLOAT16 = 0, 1, 30  # formats whose numbers torch has a type for
_DTYPES = {_FLOAT32: torch.float32, _FLOAT16: torch.float16, _BFLOAT16: torch.bfloat16}
_ROPE_FACTORS = "rope_freqs.weight"


class NotKept(Exception):
    """The family or a tensor of the file is not known; the message says which."""


def mapped(path: Path) -> NDArray[np.uint8]:
    """Map a file, or one shard of a model."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


class GgufWeights:
    """The weights of mapped files, expanded."""

    def __init__(
        self, path: Path, config: PreTrainedConfig, model: PreTrainedModel | None = None, heads: tuple[str, ...] = ()
    ) -> None:
        """Map the files. Raises BadFile, and NotKept for a family, or a tensor, that is not known.

        Without a `model` it is a decoder. Tensors whose names begin with one of `heads` are none of its parameters.
        """
        self._family = family_of(config.model_type)
        if self._family.changes is None:
            raise NotKept(f"models of type '{config.model_type}' are only known expanded")
        self._config = config
        self._files = [mapped(shard) for shard in shard_paths(path)]
        values, tensors = read_values(path), read_tensors(path)
        factors = tensors.pop(_ROPE_FACTORS, None)
        self._heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith(heads)} if heads else {}
        # The divisors of rotary embeddings' frequencies.
        self.rope_factors = None
        if factors is not None and self._family.has_rope_factors:
            self.rope_factors = self._expanded(factors).float()
        # The layers behind the model's guess further tokens, and are not used.
        num_guessing = values.get(f"{architecture(values)}.nextn_predict_layers") or 0
        guesses = tuple(f"blk.{config.num_hidden_layers + number}." for number in range(num_guessing))
        self._tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(guesses)}
        named = named_parameters(empty_model(config, torch.bfloat16) if model is None else model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named}
        self._parts = self._find_parts(architecture(values) or "")

    def _find_parts(self, of_architecture: str) -> dict[str, list[GgufTensor]]:
        """Return the tensors of each parameter. Raises NotKept if there are more."""
        try:
            names = FileNames(self._family, of_architecture, self._config.num_hidden_layers, self._tensors)
        except KeyError:
            raise NotKept(f"the installed package gguf does not know the family '{of_architecture}'") from None
        found = {parameter: names.of(parameter) for parameter in self._shapes}
        by_parameter = {parameter: [self._tensors[name] for name in own] for parameter, own in found.items() if own}
        if unknown := sorted(self._tensors.keys() - {tensor.name for own in by_parameter.values() for tensor in own}):
            raise NotKept(f"it has a tensor '{unknown[0][:100]}', which is not known")
        return by_parameter

    def names(self) -> set[str]:
        return set(self._parts)

    def head_names(self) -> set[str]:
        return set(self._heads)

    def head(self, name: str) -> Tensor:
        return self._expanded(self._heads[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter, or that in the file if it has another size."""
        asked = self._shapes[name]
        shapes = [tensor.shape for tensor in self._parts[name]]
        if (change := change_of(self._config, name)) is not None and change.joined is not None:
            return asked
        if change is not None and change.rows is not None and len(shapes) == 1:
            num_rows = len(change.rows(self._config, name))
            if num_rows < shapes[0][0]:  # a part of a matrix
                return (num_rows, *shapes[0][1:])
        dim = 1 if len(shapes[0]) == 3 else 0
        together = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
        without_ones = ([size for size in shape if size != 1] for shape in (together, asked))
        is_same = next(without_ones) == next(without_ones) or asked == (math.prod(together),)
        return asked if is_same else together

    def tensor(self, name: str) -> Tensor:
        """Return a tensor expanded, as the model's code has it."""
        tensors, change = [self._expanded(tensor) for tensor in self._parts[name]], change_of(self._config, name)
        if change is not None and change.joined is not None:
            found = change.joined(self._config, name, tensors)
            return found if found.shape == self._shapes[name] else found.view(self._shapes[name])
        tensor = torch.cat(tensors, dim=1 if tensors[0].dim() == 3 else 0) if len(tensors) > 1 else tensors[0]
        if change is not None and change.rows is not None:
            tensor = tensor[torch.from_numpy(change.rows(self._config, name))]
        if change is not None and change.columns is not None:
            tensor = tensor[:, torch.from_numpy(change.columns(self._config))]
        if change is not None and change.values is not None:
            tensor = VALUES[change.values](tensor)
        return tensor.reshape(self.shape(name))

    def _expanded(self, tensor: GgufTensor) -> Tensor:
        return expanded(self._files[tensor.shard][tensor.begin : tensor.end], tensor)


def expanded(data: NDArray[np.uint8], tensor: GgufTensor) -> Tensor:
    """Return a tensor expanded, given its bytes. Raises NotKept for a format of which that is not known."""
    if tensor.kind in _DTYPES:
        return torch.from_numpy(np.array(data)).view(_DTYPES[tensor.kind]).view(tensor.shape)
    try:
        return expand(data.reshape(math.prod(tensor.shape[:-1]), -1), tensor.kind).view(tensor.shape)
    except NotImplementedError as error:
        raise NotKept(f"its tensor '{tensor.name}' has a format that cannot be expanded") from error


def scale_frequencies(model: PreTrainedModel, factors: Tensor | None) -> None:
    """Divide the frequencies of a model's rotary embeddings by the factors of a file, if it has some."""
    if factors is not None:
        rotary: Any = model.base_model.rotary_emb
        rotary.inv_freq /= factors
