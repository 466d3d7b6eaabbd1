"""A model of transformers with its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from oaiserve.engine.decoder.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelSpec):
    """A model with its weights on the device."""

    model: PreTrainedModel


def base_of(model: PreTrainedModel) -> Any:
    """Return the part of a model that has its layers. That of Llama 4 has another name than the model says."""
    return model.model if model.base_model is model else model.base_model


def is_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Tell a linear layer from a router, which chooses by its product."""
    return isinstance(module, torch.nn.Linear) and not hasattr(module, "top_k")
