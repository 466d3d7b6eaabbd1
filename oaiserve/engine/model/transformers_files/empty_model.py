"""Creates transformers' models without the data of their parameters, to list the tensors that a file must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

_HEAD = "lm_head.weight"


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
) -> PreTrainedModel:
    """Return a model whose parameters have no data; its buffers have."""
    hook = register_module_parameter_registration_hook(_without_data)  # type: ignore[arg-type]  # it may return one
    try:
        with no_init_weights():
            model: PreTrainedModel = from_config(config, dtype=dtype, attn_implementation="eager")
    finally:
        hook.remove()
    return model


def _without_data(_: Module, __: str, parameter: Parameter) -> Parameter:
    return Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def named_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters and buffers that a file has: all except a shared output embedding."""
    is_tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (is_tied and name == _HEAD)}
