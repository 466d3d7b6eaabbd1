"""Makes transformers' models without the data of their parameters, as a list of a file's required tensors."""

from __future__ import annotations

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

_HEAD = "lm_head.weight"


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose parameters have no data; its buffers have."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model


def named_parameters(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that a file has: all but a shared output embedding."""
    is_tied = model.config.tie_word_embeddings
    return [(name, tensor) for name, tensor in model.state_dict().items() if not (is_tied and name == _HEAD)]
