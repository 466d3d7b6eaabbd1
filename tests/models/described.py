"""Small models of transformers, each with the description of its files, which executors run."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import Settings, is_wrapper, settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.load import load_weights, read_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel(ModelSpec):
    """A model of transformers, and its description."""

    model: PreTrainedModel
    decoder: Decoder


def described(model: PreTrainedModel, parent: str | None = None, **options: Any) -> SmallModel:
    """Write the files of a model into a folder in `parent`, and describe it by them; `options` are those of a start."""
    with TemporaryDirectory(dir=parent) as folder:
        model.save_pretrained(folder)
        return described_files(folder, model, **options)


def described_files(path: Path | str, model: PreTrainedModel | None = None, **options: Any) -> SmallModel:
    """Describe a model by its files, with its model of transformers, by default that in the same files."""
    model = model or model_of_files(path)
    dtype = str(model.dtype).removeprefix("torch.")
    asked = EngineOptions(**{"dtype": dtype, "compile": False, **options})
    return with_model(describe_model(find_model(path), asked, device=model.device), model)


def settings_in(folder: Path) -> Settings:
    return settings_of(_config_in(folder))


def _config_in(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@torch.inference_mode()
def decoder_in(
    folder: Path, settings: Settings | None = None, *, dtype: torch.dtype = torch.float32, length: int | None = None
) -> Decoder:
    """Describe the files in a folder, with the settings there unless there are others. Raises NotKnown."""
    config = _config_in(folder)
    if settings is None:
        settings = settings_of(config)
    family = FAMILIES[settings["model_type"]]
    tensors = HubTensors(
        TensorFiles(Checkpoint(folder), of_wrapper=is_wrapper(config)),
        family.names,
        dtype,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
    )
    return describe(tensors, settings, family, context_length(settings) if length is None else length)


def with_model(found: Described, model: PreTrainedModel) -> SmallModel:
    spec = {field.name: getattr(found.spec, field.name) for field in fields(ModelSpec)}
    return SmallModel(**spec, model=model, decoder=found.decoder)


def model_of_files(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the text model of a folder or a GGUF file, expanded, for transformers' code."""
    model = load_weights(read_checkpoint(find_model(path), str(path)), dtype, attention="eager")
    return model.eval()  # type: ignore[no-any-return]
