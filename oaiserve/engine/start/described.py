"""Describes a text model from its files, for the native step on a CPU. Neither needs code of transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import Decoder, LatentProjection, NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.keys import refuse_ignored, unknown
from oaiserve.engine.decoder.mixers import state_shapes
from oaiserve.engine.decoder.model_spec import model_spec, stored_dtype
from oaiserve.engine.decoder.reader import Tensors
from oaiserve.engine.decoder.settings import Settings, is_wrapper, settings_of
from oaiserve.engine.decoder.sources.gguf.settings import settings_of_gguf
from oaiserve.engine.decoder.sources.gguf.tensors import GgufTensors
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.cpu.kv_layout import latent_dim
from oaiserve.engine.model.cpu.library import Library
from oaiserve.errors import StartupError
from oaiserve.files.checkpoint import json_object
from oaiserve.files.gguf import read_tensors, read_values
from oaiserve.files.quantization import Quantization, read_quantization
from oaiserve.files.source import ModelSource

log = logging.getLogger(__name__)

_IN_BLOCKS = torch.bfloat16  # the dtype that suits weights of a few bits


class Described(NamedTuple):
    """A description, and what serving needs to know in addition."""

    spec: ModelSpec
    decoder: Decoder
    library: Library


class _Files(NamedTuple):
    settings: Settings
    family: Family
    tensors: Tensors
    library: Library


@torch.inference_mode()
def describe_model(source: ModelSource, options: EngineOptions) -> Described:
    """Describe the text model in these files, with the KV cache that the options name.

    Raises NotKnown for a model without a description, BuildError without a native library, and StartupError for options
    that the model cannot have.
    """
    opened = _open_gguf if source.gguf_file is not None else _open_folder
    settings, family, tensors, library = opened(source, options)
    length = _length(settings, options)
    decoder = describe(tensors, settings, family, length)
    spec = model_spec(
        settings,
        decoder,
        dtype=tensors.dtype,
        device=torch.device("cpu"),
        state_shapes=state_shapes(decoder, tensors.dtype),
        generation=_generation(Path(source.location)),
    )
    refuse_ignored(settings)
    if keys := unknown(settings):
        log.info("No type of model is known to have the settings %s, which are ignored", ", ".join(keys))
    return _with_cache(replace(spec, max_model_len=length), decoder, library, options)


def _open_gguf(source: ModelSource, options: EngineOptions) -> _Files:
    settings = settings_of_gguf(read_values(source.path), read_tensors(source.path))
    family = _family(settings)
    dtype = _dtype(_IN_BLOCKS, options)
    return _Files(settings, family, GgufTensors(source.path, family.names, settings, dtype), Library(dtype))


def _open_folder(source: ModelSource, options: EngineOptions) -> _Files:
    folder = Path(source.location)
    config = json_object(folder / "config.json")
    settings = _settings(config)
    family = _family(settings)
    given = config.get("quantization_config") or settings.stated.get("quantization_config")
    quantization = read_quantization({"quantization_config": given}) if given else None
    stored = stored_dtype(settings) if quantization is None and given is None else _IN_BLOCKS
    library = Library(_dtype(stored, options))
    files = _tensor_files(folder, given, quantization, library, of_wrapper=is_wrapper(config))
    if quantization is not None and not files.has_blocks():  # floats of 8 bits are expanded
        library = Library(_dtype(stored_dtype(settings), options))
    tensors = HubTensors(
        files,
        family.names,
        library.dtype,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
    )
    return _Files(settings, family, tensors, library)


def _tensor_files(
    folder: Path,
    given: Mapping[str, Any] | None,
    quantization: Quantization | None,
    library: Library,
    *,
    of_wrapper: bool,
) -> TensorFiles:
    if quantization is not None:
        # Longer sums cost more without tiles, because x has two levels for them.
        is_long = library.has_integer_tiles()
        return PackedWeights(folder, quantization, of_wrapper=of_wrapper, is_long=is_long)
    if given is not None:
        return Mxfp4Weights(folder)
    return TensorFiles(folder, of_wrapper=of_wrapper)


def _settings(config: dict[str, Any]) -> Settings:
    try:
        return settings_of(config)
    except KeyError as error:
        raise NotKnown(f"models of type '{config.get('model_type')}' have no description ({error})") from error


def _family(settings: Settings) -> Family:
    family = FAMILIES.get(settings["model_type"])
    if family is None:
        raise NotKnown(f"models of type '{settings['model_type']}' have no description")
    return family


def _length(settings: Settings, options: EngineOptions) -> int:
    limit = context_length(settings)
    length = options.max_model_len or limit
    if length > limit:
        raise StartupError(f"--max-model-len is {length}, but the model is good for {limit} tokens.")
    return length


def _dtype(stored: torch.dtype, options: EngineOptions) -> torch.dtype:
    if options.dtype != "auto":
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    return torch.float32 if stored == torch.float16 else stored  # float16 is slow on CPUs, and bfloat16 less precise


def _generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _with_cache(spec: ModelSpec, decoder: Decoder, library: Library, options: EngineOptions) -> Described:
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
    return Described(spec, replace(decoder, layers=layers), library)


def _latent_width(decoder: Decoder) -> int:
    for layer in decoder.layers:
        attention = layer.attention
        if attention is not None and isinstance(attention.qkv, LatentProjection):
            rank = len(attention.qkv.norm.weight)
            return latent_dim(rank, len(attention.qkv.down.weight) - rank, attention.shape)
    return 0
