"""Reads the modules of a transformers model by name, and keeps track of the parameters read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.decoder.blocks import Blocks, ExpertBlocks
from oaiserve.engine.decoder.description import Matrix, Norm, NotKnown
from oaiserve.engine.model.layer_operations import ACTIVATIONS
from oaiserve.engine.model.loaded import LoadedModel, base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModuleReader:
    """Reads one model's modules, and keeps track of the parameters read. Raises NotKnown."""

    def __init__(self, loaded: LoadedModel, blocks: Mapping[str, Blocks | ExpertBlocks]) -> None:
        """Read parameters in `blocks`, by name, as these: a tensor of all experts as the matrices of each."""
        self.loaded = loaded
        self._blocks = {id(loaded.model.get_parameter(name)): found for name, found in blocks.items()}
        self._read: set[int] = set()  # the id() of each parameter that has been read
        self._names: dict[int, str] = {id(module): name for name, module in loaded.model.named_modules()}

    def refuse_unless_all_is_read(self) -> None:
        """Raise NotKnown if the model has an unread parameter."""
        for name, parameter in self.loaded.model.named_parameters():
            if id(parameter) not in self._read:
                raise NotKnown(f"it has a parameter '{name}'")

    def name_of(self, module: Module) -> str:
        """Return the name of a module in the model."""
        return self._names[id(module)]

    def child(self, module: Module, *names: str, optional: bool = False) -> Any:
        """Return the attribute of a module under its first of these names."""
        for name in names:
            if (child := getattr(module, name, None)) is not None:
                return child
        if optional:
            return None
        raise NotKnown(f"its {type(module).__name__} has no {names[0]}")

    def parameter(self, module: Module, name: str) -> Tensor:
        """Return a parameter of any dtype."""
        parameter = getattr(module, name, None)
        if not isinstance(parameter, Tensor):
            raise NotKnown(f"its {type(module).__name__} has no {name}")
        self._read.add(id(parameter))
        return parameter.detach()

    def floats(self, module: Module, name: str) -> Tensor | None:
        """Return a parameter in float32, or None if the module has none of this name."""
        return None if getattr(module, name, None) is None else self.parameter(module, name).float()

    def tensor(self, module: Module, name: str = "weight") -> Tensor:
        """Return a parameter in the model's dtype."""
        weight = self.parameter(module, name)
        if weight.dtype != self.loaded.dtype:
            raise NotKnown(f"it has weights in {weight.dtype} beside those in {self.loaded.dtype}")
        return weight

    def weights(self, module: Module) -> Tensor | Blocks:
        """Return the weights of a module, in quantization blocks if there are any."""
        tensor = self.tensor(module)
        found = self._blocks.get(id(module.weight), tensor)
        assert not isinstance(found, list)
        return found

    def expert_blocks(self, module: Module, name: str) -> ExpertBlocks | None:
        """Return the matrices of each expert, for a tensor of all experts in quantization blocks."""
        found = self._blocks.get(id(getattr(module, name)))
        return found if isinstance(found, list) else None

    def matrix(self, module: Module) -> Matrix:
        """Return the matrix of a linear layer."""
        bias = None if getattr(module, "bias", None) is None else self.parameter(module, "bias")
        if type(module).__name__ == "Conv1D":  # GPT-2's linear layers, with their weights the other way round
            return Matrix(self.tensor(module).T.contiguous(), bias, self._names[id(module)])
        weight = self.weights(module)
        if not isinstance(module, torch.nn.Linear):
            raise NotKnown(f"it has matrices of type {type(module).__name__}")
        return Matrix(weight, bias, self._names[id(module)])

    def matrix_of(self, module: Module, *names: str) -> Matrix | None:
        """Return the matrix of a module under its first of these names, or None."""
        linear = self.child(module, *names, optional=True)
        return None if linear is None else self.matrix(linear)

    def norm_of(self, module: Module, *names: str) -> Norm | None:
        """Return the norm of a module under its first of these names, or None."""
        norm = self.child(module, *names, optional=True)
        return None if norm is None else self.norm(norm)

    def norm(self, norm: Module) -> Norm:
        """Return a norm with weights, or that of OLMo."""
        if isinstance(norm, torch.nn.LayerNorm) and norm.weight is not None:
            weight = self.parameter(norm, "weight").float()
            if type(norm).__name__ == "NemotronLayerNorm1P":  # stored minus 1
                weight = weight + 1
            return Norm(weight, self.floats(norm, "bias"), norm.eps, subtracts_mean=True)
        if type(norm).__name__ == "OlmoLayerNorm":  # without weights
            sizes: Any = norm.normalized_shape
            return Norm(torch.ones(sizes), None, 1e-5, subtracts_mean=True)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if "Norm" in type(norm).__name__ and isinstance(epsilon, float):
            weight = self.parameter(norm, "weight").float()
            if weight.dim() > 1:  # each head has its own
                raise NotKnown(f"it has norms of type {type(norm).__name__}")
            # Some families store the weight minus 1, and some norms subtract the mean. The outputs show which it is.
            plain = Norm(weight, None, epsilon, subtracts_mean=False)
            x = torch.linspace(-1, 2, len(weight))
            outputs = norm(x.to(self.loaded.dtype)).float()
            kinds = (plain, replace(plain, weight=weight + 1), replace(plain, subtracts_mean=True))
            difference, kind = min((float((kind(x) - outputs).norm()), i) for i, kind in enumerate(kinds))
            if difference <= 0.02 * float(outputs.norm()):
                return kinds[kind]
        raise NotKnown(f"it has norms of type {type(norm).__name__}")

    def activation(self, function: Any) -> str:
        """Return the name of the activation function, which its outputs show."""
        x = torch.linspace(-4, 4, 101)
        with torch.inference_mode():
            expected = function(x)
        for name, known in ACTIVATIONS.items():
            if torch.allclose(known(x), expected, atol=1e-6):
                return name
        raise NotKnown(f"its activation is {type(function).__name__}")


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the module with a model's embedding, its layers and the norm behind them."""
    base = base_of(model)
    return getattr(base, "decoder", base)


def layers_of(model: PreTrainedModel) -> Any:
    """Return the list of a model's layers. Raises NotKnown if it has another name than those that are known."""
    decoder = decoder_of(model)
    for name in ("layers", "h", "blocks"):
        if (layers := getattr(decoder, name, None)) is not None:
            return layers
    raise NotKnown(f"its {type(decoder).__name__} has no layers")


def unscaled_norm(norm: Any, width: int) -> Norm:
    """Describe a norm without weights."""
    if getattr(norm, "weight", None) is not None or not isinstance(getattr(norm, "eps", None), float):
        raise NotKnown(f"it has norms of type {type(norm).__name__}")
    return Norm(torch.ones(width), None, norm.eps, subtracts_mean=False)
