"""Loads a model's weights from a folder, the Hub or a GGUF file."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils.quantization_config import Mxfp4Config

from oaiserve.checkpoints.bad_file import refuse_too_large
from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.gguf import architecture
from oaiserve.checkpoints.load_errors import reported, tensors_named
from oaiserve.checkpoints.progress import counted
from oaiserve.checkpoints.quantization import Quantization, refuse_costly_patterns
from oaiserve.checkpoints.setting_types import CONFIG, settings_named
from oaiserve.checkpoints.source import ModelSource
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.sources.wrapped_names import KEYS
from oaiserve.engine.model.model_config import (
    is_mxfp4,
    quantization_of,
    refuse_unless_computable,
)
from oaiserve.engine.model.transformers_files.empty_model import empty_model, named_parameters
from oaiserve.engine.model.transformers_files.gguf_config import read_config
from oaiserve.engine.model.transformers_files.gguf_weights import GgufWeights, scale_frequencies
from oaiserve.engine.model.transformers_files.wrapper import bring_layout, text_config
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

# Never run code that comes with a model, and never ask the user about it at the terminal.
_ARGUMENTS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
OF_WEIGHTS: dict[str, Any] = _ARGUMENTS | {
    "use_safetensors": True,
    "weights_only": True,
    "output_loading_info": True,
}


class TransformersCheckpoint(NamedTuple):
    """A checkpoint with the configuration that transformers derives from it."""

    name: str  # as the user typed it
    source: ModelSource
    config: PreTrainedConfig
    quantization: Quantization | None
    is_wrapped: bool  # the text model within a multimodal one

    @property
    def is_gguf(self) -> bool:
        return self.source.gguf_file is not None


def config_of(source: ModelSource) -> PreTrainedConfig:
    """Read the configuration in a model's files. Raises StartupError, which names a setting of the wrong type, and
    whatever transformers raises."""
    if source.gguf_file is not None:
        return read_config(source.checkpoint)
    with settings_named(Path(source.location), (CONFIG,)):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, **_ARGUMENTS)
    for setting in fields(config):
        refuse_too_large(setting.name, getattr(config, setting.name, None))
    return config


def read_checkpoint(source: ModelSource, name: str) -> TransformersCheckpoint:
    """Read a model's configuration, or that of the text model in a multimodal one. Raises StartupError if transformers'
    code can't compute the model."""
    with reported(f"No model could be loaded from {source.shown}"):
        config = config_of(source)
        text = text_config(config)
        if text is not None:
            log.debug("'%s' is multimodal (%s)", name, config.model_type)
            bring_layout(config)
            config = text
        refuse_unless_computable(config, name)
        quantization = quantization_of(config, name)
    return TransformersCheckpoint(name, source, config, quantization, text is not None)


def load_weights(
    checkpoint: TransformersCheckpoint, dtype: torch.dtype, *, attention: str | None = None
) -> PreTrainedModel:
    """Make transformers' model with the weights of a checkpoint in `dtype`.

    `attention` is the implementation that transformers uses; None: its choice. Raises StartupError if a weight cannot
    be read, or if one is missing.
    """
    _, source, config, quantization, is_wrapped = checkpoint
    folder = Path(source.location)
    failure = f"The weights of '{checkpoint.name}' could not be loaded"
    with (
        reported(failure),
        settings_named(folder, (CONFIG,)),
        tensors_named(allows_unread=is_wrapped),
        _unknown_value_named(config),
    ):
        if quantization is not None:
            packed = PackedWeights(source.checkpoint, quantization, of_wrapper=is_wrapped)
            loaded, report = _load_expanded(config, packed, dtype, attention, generation_defaults(folder))
            names = checkpoint.name, quantization.name, str(dtype).removeprefix("torch.")
            log.debug("The weights of '%s', in %s, are expanded to %s", *names)
        elif checkpoint.is_gguf and architecture(source.checkpoint.head.values) in ARCHITECTURES:
            in_file = GgufWeights(source.checkpoint.head, named_parameters(empty_model(config, torch.bfloat16)))
            loaded, report = _load_expanded(config, in_file, dtype, attention)
            scale_frequencies(loaded, in_file.rope_factors)
        elif checkpoint.is_gguf:
            loaded, report = _load_gguf_by_transformers(checkpoint, dtype, attention)
        else:
            loaded, report = _load_by_transformers(checkpoint, dtype, attention)
        if not checkpoint.is_gguf:
            restore_padding(loaded, source.checkpoint)
    if checkpoint.is_gguf and (defaults := generation_defaults(folder)) is not None:
        loaded.generation_config = defaults
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        why = ""
        architectures = checkpoint.config.architectures or ()
        for name in architectures[:1]:
            if not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
                why = f" Its architecture is {name}, which generates no text."
        raise StartupError(
            f"'{checkpoint.name}' has no weights for {len(missing)} of the tensors that its config.json describes, "
            f"such as {missing[0]}.{why}"
        )
    return loaded


@contextmanager
def _unknown_value_named(config: PreTrainedConfig) -> Iterator[None]:
    """Raise ValueError with the name of a setting, instead of a KeyError with its value, such as the name of an
    activation that transformers doesn't have."""
    try:
        yield
    except KeyError as error:
        names = [key for key, value in _settings(vars(config)) if [value] == list(error.args)]
        if not names:
            raise
        raise ValueError(f"its {names[0]} is {error.args[0]!r}, which transformers doesn't know") from error


def _settings(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each setting in a part of a configuration with its name, inner parts first."""
    for value in part.values():
        if isinstance(value, Mapping):
            yield from _settings(value)
    yield from part.items()


def _load_by_transformers(
    checkpoint: TransformersCheckpoint, dtype: torch.dtype, attention: str | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Let transformers load a model in its own way. Return the model, and transformers' report about the load."""
    arguments = OF_WEIGHTS | {"attn_implementation": attention}
    if checkpoint.is_wrapped:
        arguments |= {"key_mapping": KEYS, "config": checkpoint.config}
    if is_mxfp4(checkpoint.config):
        refuse_costly_patterns(checkpoint.config.to_dict())
        arguments["quantization_config"] = Mxfp4Config(dequantize=True)
    # transformers' type annotations don't show that it returns a pair.
    pair: Any = AutoModelForCausalLM.from_pretrained(checkpoint.source.location, dtype=dtype, **arguments)
    return pair  # type: ignore[no-any-return]


def restore_padding(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Restore the padding token's row of Youtu's embedding from the files, because transformers sets it to zeros."""
    config: Any = model.config
    if config.model_type == "youtu" and (row := config.pad_token_id) is not None:
        embedding: Any = model.get_input_embeddings()
        with torch.no_grad():
            embedding.weight[row] = TensorFiles(checkpoint).tensor("model.embed_tokens.weight")[row]


def _load_gguf_by_transformers(
    checkpoint: TransformersCheckpoint, dtype: torch.dtype, attention: str | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Let transformers read the weights of a GGUF file whose architecture we don't know."""
    path = checkpoint.source.path
    if len(checkpoint.source.checkpoint.head.paths) > 1:
        raise StartupError(
            f"'{checkpoint.name}' is the first of several parts, which models of type '{checkpoint.config.model_type}' "
            "are not read from. Make one file of them: llama-gguf-split --merge FIRST_PART WHOLE_FILE"
        )
    model = empty_model(checkpoint.config, dtype)  # transformers' `from_pretrained` would need accelerate.
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model, torch_dtype=dtype)
    return _with_tensors(checkpoint.config, read["tensors"], dtype, attention)


def _load_expanded(
    config: PreTrainedConfig,
    weights: PackedWeights | GgufWeights,
    dtype: torch.dtype,
    attention: str | None,
    generation: GenerationConfig | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Make a model from quantized weights by expanding them, and return it with transformers' report about the load."""
    tensors = {}
    for name in counted("Expanding weights", weights.names(), lambda name: dtype.itemsize * prod(weights.shape(name))):
        tensor = weights.tensor(name)
        if tensor.is_floating_point():
            tensors[name] = tensor.to(dtype)
        else:
            tensors[name] = tensor
    model, report = _with_tensors(config, tensors, dtype, attention)
    if generation is not None:
        model.generation_config = generation
    return model, report


def _with_tensors(
    config: PreTrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype, attention: str | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    plain = copy.deepcopy(config)
    for key in ("quantization_config", "compression_config"):
        plain.__dict__.pop(key, None)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    pair: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
        None,
        config=plain,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    return pair


def generation_defaults(folder: Path) -> GenerationConfig | None:
    """Read the generation settings of a folder. transformers does that itself only when it loads the weights."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return None
