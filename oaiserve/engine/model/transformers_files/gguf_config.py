"""Creates transformers' configuration for the model of a GGUF file.

Most fields come from the same metadata in all families; each family adds the others. For families that have no
description, transformers reads the files itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.gguf import GgufTensor, architecture
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES
from oaiserve.engine.decoder.sources.gguf.metadata import Metadata
from oaiserve.engine.decoder.sources.gguf.settings import common_fields
from oaiserve.engine.model.transformers_files.gguf_encoders import ENCODERS
from oaiserve.errors import StartupError

_READ_HERE = ENCODERS | ARCHITECTURES


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of a file's model. Raises StartupError for missing metadata."""
    path = checkpoint.path
    try:
        values = checkpoint.head.values
        tensors = checkpoint.head.tensors
        if architecture(values) in _READ_HERE:
            return config_of(values, tensors)
        config = _of_transformers(path, architecture(values))
        config.tie_word_embeddings = "output.weight" not in tensors  # transformers checks only the first file
        width = values.get(f"{architecture(values)}.attention.key_length")
        if width is not None and hasattr(config, "head_dim"):  # For some types, transformers ignores the file's.
            config.head_dim = width
        return config
    except BadFile as error:
        raise StartupError(f"'{path}' cannot be used: {error}.") from error


def config_of(values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
    """Return the configuration that these metadata describe. Raises BadFile if required metadata are missing."""
    metadata = Metadata(values, tensors)
    of_files = _READ_HERE[metadata.architecture]
    own = of_files.fields(metadata)
    kind: Any = CONFIG_MAPPING[own.pop("model_type", of_files.type)]
    fields = common_fields(metadata).items()
    known = {field: value for field, value in fields if field == "head_dim" or hasattr(kind, field)}  # not all list it
    config: PreTrainedConfig = kind(**known | own)
    return config


def _of_transformers(path: Path, name: str | None) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    except ValueError as error:
        if "is not supported" not in str(error):
            raise
        raise BadFile(
            f"its architecture is '{name}', which is not read from GGUF files; serve the folder or hub id with the "
            "safetensors that it was made from"
        ) from error
    return config
