"""Reads from a model's configuration whether it can be served, and how: its longest request, its dtype, its packing."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oaiserve.errors import StartupError
from oaiserve.files.bad_file import BadFile
from oaiserve.files.quantization import Quantization, read_quantization

log = logging.getLogger(__name__)

# These scale every position by the longest sequence of the batch, so an answer would depend on other requests.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_MOST_POSITIONS = 2**20  # rotary tables have a row for each, all together a GiB for the largest heads


def refuse_unless_computable(config: PreTrainedConfig, name: str) -> None:
    """Raise StartupError for a model that is no text model, or whose code or weights transformers does not have."""
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


def refuse_longer(max_model_len: int | None, config: PreTrainedConfig) -> None:
    """Raise StartupError for requests that may be longer than the model is good for."""
    has_attention = getattr(config, "num_attention_heads", None) is not None
    limit = context_length(config) if has_attention else _MOST_POSITIONS  # states know no positions
    if max_model_len is not None and max_model_len > limit:
        raise StartupError(f"--max-model-len is {max_model_len}, but the model is good for {limit} tokens.")


def context_length(config: PreTrainedConfig) -> int:
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048
    limit = min(int(limit), _MOST_POSITIONS)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    return limit


def select_dtype(
    name: str, config: PreTrainedConfig, device: torch.device, *, is_gguf: bool, for_tensor_cores: bool = False
) -> torch.dtype:
    """Return the dtype of this name, or the one that suits the model and the device. With `for_tensor_cores`, a model
    in float32 gets one of 16 bits on a GPU: in float32, its tensor cores are idle, and the KV cache takes twice the
    memory.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if is_gguf:
        return torch.bfloat16  # weights in a GGUF file have a few bits each; its config has no dtype
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if device.type == "cpu":  # float16 is slow there, and its range is narrower than bfloat16's
        return torch.float32 if dtype == torch.float16 else dtype
    if device.type == "cuda" and dtype == torch.float32 and for_tensor_cores:
        half = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        log.debug("The model is in float32, and is served in %s: see --dtype", str(half).removeprefix("torch."))
        return half
    return dtype


def quantization_of(config: PreTrainedConfig, name: str) -> Quantization | None:
    """Return the quantization of a checkpoint, or None. Raises StartupError for a kind that is not read."""
    try:
        return read_quantization(vars(config))
    except BadFile as error:
        raise StartupError(f"'{name}' cannot be served: {error}.") from error


def is_mxfp4(config: PreTrainedConfig) -> bool:
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "mxfp4"
