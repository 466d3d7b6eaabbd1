"""Describes a text model from its files, and builds the native step that runs the description on a CPU.

Neither needs code of transformers.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.dense import describe
from oaiserve.engine.decoder.description import Decoder, LatentProjection, NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.keys import refuse_ignored, unknown
from oaiserve.engine.decoder.mixers import state_shapes
from oaiserve.engine.decoder.model_spec import model_spec, stored_dtype
from oaiserve.engine.decoder.settings import Settings, settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.spec import KVShape, ModelSpec
from oaiserve.engine.model.cpu.kv_layout import latent_dim
from oaiserve.errors import StartupError
from oaiserve.files.checkpoint import json_object
from oaiserve.files.quantization import read_quantization
from oaiserve.files.source import ModelSource

log = logging.getLogger(__name__)


class Described(NamedTuple):
    """A description, and what serving needs to know beside it."""

    spec: ModelSpec
    decoder: Decoder


@torch.inference_mode()
def describe_model(source: ModelSource, options: EngineOptions) -> Described:
    """Describe the text model in these files, with the KV cache that the options name.

    Raises NotKnown for a model without a description, and StartupError for options that it cannot have.
    """
    folder = Path(source.location)
    if source.gguf_file is not None:
        raise NotKnown("its file is a GGUF file")
    config = json_object(folder / "config.json")
    if "quantization_config" in config or read_quantization(config) is not None:
        raise NotKnown("its weights are quantized")
    settings = _settings(config)
    family = FAMILIES.get(settings["model_type"])
    if family is None:
        raise NotKnown(f"models of type '{settings['model_type']}' have no description")
    length = _length(settings, options)
    dtype = _dtype(settings, options)
    tensors = HubTensors(
        TensorFiles(folder, of_wrapper=settings.stated is not config),
        family.names,
        dtype,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
    )
    decoder = describe(tensors, settings, family, length)
    spec = model_spec(
        settings,
        decoder,
        dtype=dtype,
        device=torch.device("cpu"),
        state_shapes=state_shapes(decoder, dtype),
        generation=_generation(folder),
    )
    refuse_ignored(settings)
    if keys := unknown(settings):
        log.info("No type of model is known to have the settings %s, which are ignored", ", ".join(keys))
    return _with_cache(replace(spec, max_model_len=length), decoder, options)


def _settings(config: dict[str, Any]) -> Settings:
    try:
        return settings_of(config)
    except KeyError as error:
        raise NotKnown(f"models of type '{config.get('model_type')}' have no description ({error})") from error


def _length(settings: Settings, options: EngineOptions) -> int:
    limit = context_length(settings)
    length = options.max_model_len or limit
    if length > limit:
        raise StartupError(f"--max-model-len is {length}, but the model is good for {limit} tokens.")
    return length


def _dtype(settings: Settings, options: EngineOptions) -> torch.dtype:
    if options.dtype != "auto":
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    stored = stored_dtype(settings)
    return torch.float32 if stored == torch.float16 else stored  # float16 is slow on CPUs, and bfloat16 less precise


def _generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _with_cache(spec: ModelSpec, decoder: Decoder, options: EngineOptions) -> Described:
    """Return the model with the form of KV cache that the native step keeps: of latent vectors where these fit."""
    width = _latent_width(decoder)
    if width and options.kv_cache_dtype != "auto":
        raise StartupError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is for keys and values, in place of which the KV cache of "
            f"'{spec.name}' has latent vectors, of {width} numbers for a token and layer."
        )
    spec = spec.with_latent_cache(width) if width else spec.with_cache(options.kv_cache_dtype)
    layers = []
    for number, layer in enumerate(decoder.layers):
        attention = layer.attention
        if attention is not None:
            owner = number if attention.cache_of is None else attention.cache_of
            layer = replace(layer, attention=replace(attention, shape=spec.kv_shapes[owner]))
        layers.append(layer)
    return Described(spec, replace(decoder, layers=layers))


def _latent_width(decoder: Decoder) -> int:
    projections: list[tuple[LatentProjection, KVShape]] = []
    for layer in decoder.layers:
        if layer.attention is not None and isinstance(layer.attention.qkv, LatentProjection):
            projections.append((layer.attention.qkv, layer.attention.shape))
    if not projections:
        return 0
    projection, shape = projections[0]
    rank = len(projection.norm.weight)
    return latent_dim(rank, len(projection.down.weight) - rank, shape)
