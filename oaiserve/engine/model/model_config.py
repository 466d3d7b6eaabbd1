"""Reads from a model's configuration whether it can be served, its longest request, its dtype and its quantization."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.quantization import Quantization, read_quantization
from oaiserve.engine.decoder.context_length import MOST_POSITIONS
from oaiserve.engine.decoder.context_length import context_length as length_by_settings
from oaiserve.engine.model.device import suitable_dtype
from oaiserve.errors import StartupError


def refuse_unless_computable(config: PreTrainedConfig, name: str) -> None:
    """Raise StartupError for a model that isn't a text model, or whose code or weights transformers doesn't support."""
    problem = None
    if "/" in str(config._attn_implementation):
        problem = f"it names code from the Hub for its attention ({config._attn_implementation})"
    elif config.is_encoder_decoder:
        problem = "it is an encoder-decoder model"
    elif set(config.sub_configs) & {"vision_config", "audio_config"}:
        problem = "its text model needs images or audio"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = f"transformers has no text generation model of type '{config.model_type}'"
    if problem is not None:
        raise StartupError(f"'{name}' cannot be served: {problem}.")


def most_tokens(config: PreTrainedConfig) -> int:
    """Return the length of the longest request that a user may allow."""
    if getattr(config, "num_attention_heads", None) is None:
        return MOST_POSITIONS  # States have no positions.
    return context_length(config)


def context_length(config: PreTrainedConfig) -> int:
    """Return the length of the longest sequence that the model computes in the same way as shorter ones."""
    keys = ("max_position_embeddings", "max_seq_len", "rope_parameters")
    limit = length_by_settings({key: getattr(config, key, None) for key in keys})
    # In the first chunk, attention caches hold all earlier tokens.
    chunk = getattr(config, "attention_chunk_size", None)
    return limit if chunk is None else min(limit, chunk - 1)


def select_dtype(
    name: str, config: PreTrainedConfig, device: torch.device, *, is_gguf: bool, for_tensor_cores: bool = False
) -> torch.dtype:
    """Return the dtype of this name, or the one that suits the model and the device.

    On a GPU, a model in float32 gets a dtype of 16 bits only with `for_tensor_cores`.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if is_gguf:
        return torch.bfloat16  # Weights in a GGUF file have a few bits each, and its configuration states no dtype.
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return suitable_dtype(dtype, device) if for_tensor_cores or device.type == "cpu" else dtype


def quantization_of(config: PreTrainedConfig, name: str) -> Quantization | None:
    """Return the quantization of a checkpoint, or None. Raises StartupError for an unsupported kind."""
    try:
        return read_quantization(vars(config))
    except BadFile as error:
        raise StartupError(f"'{name}' cannot be served: {error}.") from error


def is_mxfp4(config: PreTrainedConfig) -> bool:
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "mxfp4"
