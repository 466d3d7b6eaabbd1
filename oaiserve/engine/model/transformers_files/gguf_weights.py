"""Reads and expands the tensors of a GGUF file, under the names of transformers' parameters.

Each tensor of a file must belong to a parameter. In a file, the experts of a layer share one tensor for gates and one
for ups. Transformers joins both into one parameter, with all gates first, or in gpt-oss with alternating rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.checkpoints.gguf import GgufHead
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import family_of
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.sources.gguf.settings import settings_of_gguf
from oaiserve.engine.decoder.sources.gguf.tensors import GgufTensors
from oaiserve.engine.decoder.sources.names import Names, names_of, split_path

_ROPE_FACTORS = "frequency_factors"
# The endings of names in transformers, and those of paths. Names of tensors of all experts don't end with "weight".
_ENDINGS = (("", ""), ("", ".weight"), (".weight", ".weight"), (".bias", ".bias"), ("_bias", ".bias"))


class GgufWeights:
    """The weights of a decoder in a GGUF file, which has one of ARCHITECTURES."""

    def __init__(self, head: GgufHead, parameters: Mapping[str, Tensor], heads: tuple[str, ...] = ()) -> None:
        """Map the file.

        Raises BadFile, and NotKnown for a tensor that belongs to no parameter, unless its name begins with one of
        `heads`.
        """
        settings = settings_of_gguf(head.values, head.tensors)
        family = family_of(settings)
        assert family is not None, settings["model_type"]  # A known architecture has one.
        self._family = family
        # The model's own code decides which tokens see later ones, and limits queries, keys and values.
        own_code = {"use_bidirectional_attention": False, "clip_qkv": None}
        self._facts = self._family.facts(settings_of({**settings.stated, **own_code}))
        self._tensors = GgufTensors(head, self._family.names, settings, torch.float32)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        paths = paths_of_parameters(parameters, self._family.names, self._facts.num_layers)
        self._paths = {name: found for name, choices in paths.items() if (found := self._first(choices)) is not None}
        for read in (*self._paths.values(), [_ROPE_FACTORS]):
            for one in read:
                self._tensors.leave_out(one)
        if unknown := [name for name in self._tensors.unread() if not name.startswith(heads)]:
            raise NotKnown(f"it has a tensor '{unknown[0][:100]}', which is not known")

    def _first(self, choices: list[str]) -> list[str] | None:
        """Return the file's tensors for a parameter: one, or the gates and the ups of experts."""
        for path in choices:
            apart = [path.replace(".experts.gate_up.", f".experts.{part}.") for part in ("gate", "up")]
            for tensors in ([path], apart):
                if all(map(self._tensors.has, tensors)):
                    return tensors
        return None

    @property
    def rope_factors(self) -> Tensor | None:
        """Return the divisors of the rotary embeddings' frequencies, which the configuration lacks."""
        return self._tensors.numbers(_ROPE_FACTORS) if self._tensors.has(_ROPE_FACTORS) else None

    def names(self) -> set[str]:
        return set(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in float32, in the parameter's shape, or in the file's if their sizes differ."""
        path = self._paths[name][0]
        role = split_path(path)[0].removeprefix("layers.{}.")
        parts = [self._tensors.numbers(one) for one in self._paths[name]]
        tensor = parts[0]
        if len(parts) > 1:
            mixture = self._facts.mixture
            is_in_turns = mixture is not None and mixture.is_in_turns
            tensor = torch.stack(parts, dim=2).flatten(1, 2) if is_in_turns else torch.cat(parts, dim=1)
        if role.endswith("norm.weight") and not role.startswith("mixer.") and self._facts.norm.adds_one:
            tensor = tensor - 1
        if role == "mixer.A_log":
            tensor = (-tensor).log()
        is_turned = self._family.has_transposed_experts if tensor.dim() == 3 else self._family.is_transposed
        if tensor.dim() > 1 and is_turned and path.startswith("layers."):
            tensor = tensor.mT
        shape = self._shapes[name]
        return tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor


def paths_of_parameters(parameters: Mapping[str, Tensor], names: Names, num_layers: int) -> dict[str, list[str]]:
    """Return the paths that transformers' parameters may have in a decoder, such as `layers.3.q.weight`.

    In a model without its head, parameters may lack the first part of their names.
    """
    by_module: dict[str, list[str]] = defaultdict(list)
    for path in _paths(names, num_layers):
        for module in names_of(path, names):
            by_module[module].append(path)
            by_module[module.partition(".")[2]].append(path)
    found: dict[str, list[str]] = {}
    for name in parameters:
        found[name] = []
        for suffix, last in _ENDINGS:
            if name.endswith(suffix):
                found[name] += [f"{path}{last}" for path in by_module.get(name.removesuffix(suffix), ())]
    return found


def _paths(names: Names, num_layers: int) -> Iterator[str]:
    for role in names:
        if "{}" not in role:
            yield role
            yield from (f"layers.{number}.{role}" for number in range(num_layers))


def scale_frequencies(model: PreTrainedModel, factors: Tensor | None) -> None:
    """Divide the frequencies of a model's rotary embeddings by the factors of a file, if it has any."""
    if factors is not None:
        rotary: Any = model.base_model.rotary_emb
        rotary.inv_freq /= factors
        rotary.original_inv_freq = rotary.inv_freq.clone()  # Some kinds return to these at each step.
