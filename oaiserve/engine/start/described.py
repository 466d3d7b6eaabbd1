"""Describes a text model from its files, for the device that runs it. Needs none of transformers' code."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.checkpoint import GENERATION, Checkpoint
from oaiserve.checkpoints.gguf import GgufHead
from oaiserve.checkpoints.load_errors import named
from oaiserve.checkpoints.quantization import read_quantization
from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.context_length import MOST_POSITIONS, context_length, refuse_longer
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import Decoder, LatentProjection, NotKnown
from oaiserve.engine.decoder.families import family_of
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.key_sizes import with_key_sizes
from oaiserve.engine.decoder.keys import refuse_ignored, unknown
from oaiserve.engine.decoder.model_spec import model_spec, stored_dtype
from oaiserve.engine.decoder.quantized_file import QuantizedFile
from oaiserve.engine.decoder.settings import Settings, is_wrapper, settings_of
from oaiserve.engine.decoder.sources.encoded_weights import EncodedWeights
from oaiserve.engine.decoder.sources.gguf.settings import settings_of_gguf
from oaiserve.engine.decoder.sources.gguf.tensors import GgufTensors
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.native.encoder import Encoder
from oaiserve.engine.executors.native.kv_layout import latent_dim
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.model.device import suitable_dtype
from oaiserve.errors import StartupError
from oaiserve.storage.private import NotPrivate
from oaiserve.system_cpus import default_threads

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_IN_BLOCKS = torch.bfloat16  # the dtype for weights in blocks of few bits


class Described(NamedTuple):
    spec: ModelSpec
    decoder: Decoder
    library: Library | None  # None: without --compile, or on a GPU
    quantized: QuantizedFile | None = None  # a new file with the blocks that --quantize has made, which has no name yet
    tensors: HubTensors | GgufTensors | None = None  # tensors of its files


class _Files(NamedTuple):
    settings: Settings
    family: Family
    tensors: HubTensors | GgufTensors
    library: Library | None
    quantized: QuantizedFile | None = None


@contextmanager
def _unexpected_files_not_known() -> Iterator[None]:
    """Raise NotKnown instead of the errors that unexpected shapes of tensors or types of settings cause."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.debug("The files cannot be described", exc_info=True)
        raise NotKnown(f"its files cannot be described ({named(error)})") from error


@_unexpected_files_not_known()
@torch.inference_mode()
def describe_model(
    source: ModelSource, options: EngineOptions, blocks: Path | None = None, device: torch.device = _CPU
) -> Described:
    """Describe the text model in these files, with the KV cache that the options name on the device.

    `blocks` is the file with the blocks that --quantize made in an earlier start. Raises NotKnown for a model without a
    description, BuildError if --compile finds no native library, and StartupError for options that the model doesn't
    support.
    """
    if source.gguf_file is not None:
        settings, family, tensors, library, quantized = _open_gguf(source, options, device)
    else:
        settings, family, tensors, library, quantized = _open_folder(source, options, blocks, device)
    length = _length(settings, family, options)
    decoder = describe(tensors, settings, family, length)
    spec = model_spec(
        settings,
        decoder,
        dtype=tensors.dtype,
        device=device,
        generation=_generation(source),
    )
    refuse_ignored(settings)
    if keys := unknown(settings):
        log.info("No type of model is known to have the settings %s, which are ignored", ", ".join(keys))
    described = _with_cache(replace(spec, max_model_len=length), decoder, library, options)
    return described._replace(quantized=quantized, tensors=tensors)


@_unexpected_files_not_known()
def refuse_by_header(source: ModelSource, options: EngineOptions) -> None:
    """Raise StartupError for options that the model doesn't support, as far as its settings show that, and NotKnown for
    a model without a description. This takes milliseconds, while compiling native code takes minutes."""
    if source.gguf_file is not None:
        if options.quantize != "none":
            raise _already_quantized(options, source.path.name)
        settings = _settings_of_gguf(source.checkpoint.head)
    else:
        config = source.checkpoint.config
        settings = _settings(config)
        if options.quantize != "none" and _stated_quantization(config, settings):
            raise _already_quantized(options, source.location)
    _length(settings, _family(settings), options)


def _settings_of_gguf(head: GgufHead) -> Settings:
    return settings_of_gguf(head.values, head.tensors)


def _open_gguf(source: ModelSource, options: EngineOptions, device: torch.device) -> _Files:
    if options.quantize != "none":
        raise _already_quantized(options, source.path.name)
    settings = _settings_of_gguf(source.checkpoint.head)
    family = _family(settings)
    dtype = _dtype(_IN_BLOCKS, options, device)
    tensors = GgufTensors(source.checkpoint.head, family.names, settings, dtype)
    return _Files(settings, family, tensors, _library(dtype, options, device))


def _open_folder(source: ModelSource, options: EngineOptions, blocks: Path | None, device: torch.device) -> _Files:
    checkpoint = source.checkpoint
    config = checkpoint.config
    settings = _settings(config)
    family = _family(settings)
    stated = _stated_quantization(config, settings)
    if stated and options.quantize != "none":
        raise _already_quantized(options, source.location)
    if stated:
        quantization = read_quantization({"quantization_config": stated})
    else:
        quantization = None
    makes_blocks = device.type == "cpu" and options.quantize != "none"  # A GPU quantizes matrices as it places them.
    has_blocks = stated is not None or makes_blocks
    dtype = _dtype(_IN_BLOCKS if has_blocks else stored_dtype(settings), options, device)
    library = _library(dtype, options, device)
    files: TensorFiles
    of_wrapper = is_wrapper(config)
    if quantization is not None:
        # Without integer tiles, longer sums cost more, because x has two levels for them.
        is_long = library is not None and library.has_integer_tiles()
        on_gpu = device.type != "cpu"
        files = PackedWeights(checkpoint, quantization, of_wrapper=of_wrapper, is_long=is_long, reads_later=on_gpu)
        if not files.has_blocks():  # 8-bit floats, which a CPU expands
            dtype = _dtype(stored_dtype(settings), options, device)
            library = _library(dtype, options, device)
    elif stated is not None:
        files = Mxfp4Weights(checkpoint)
    elif makes_blocks:
        if family.is_transposed:
            raise NotKnown("the matrices of this family are transposed, and not quantized")
        assert library is not None  # --quantize refuses --no-compile
        files = _encoded(checkpoint, options, library, blocks, of_wrapper=of_wrapper)
    else:
        files = TensorFiles(checkpoint, of_wrapper=of_wrapper)
    tensors = HubTensors(
        files,
        family.names,
        dtype,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
        keeps_dtype=device.type != "cpu",
    )
    return _Files(settings, family, tensors, library, files.file if isinstance(files, EncodedWeights) else None)


def _encoded(
    checkpoint: Checkpoint, options: EngineOptions, library: Library, blocks: Path | None, *, of_wrapper: bool
) -> EncodedWeights:
    encode = Encoder(library, options.cpu_threads or default_threads())
    in_4_bits = options.quantize == "int4"
    files = EncodedWeights(checkpoint, encode, in_4_bits=in_4_bits, of_wrapper=of_wrapper)
    if blocks is not None and files.read_from_file(blocks):
        return files
    if options.quantized_cache:
        try:
            files.write_to_file(options.quantized_cache)
        except (NotPrivate, OSError) as error:
            log.warning("The next start quantizes the weights again, because they could not be stored: %s", error)
    return files


def _stated_quantization(config: Mapping[str, Any], settings: Settings) -> Any:
    return config.get("quantization_config") or settings.stated.get("quantization_config")


def _already_quantized(options: EngineOptions, name: str) -> StartupError:
    return StartupError(
        f"--quantize {options.quantize} is for weights that are not quantized yet; those of '{name}' are, and stay as "
        "they are without the flag."
    )


def _settings(config: Mapping[str, Any]) -> Settings:
    try:
        return settings_of(config)
    except KeyError as error:
        if error.args == ("model_type",):
            raise NotKnown("its config.json has no model_type") from error
        raise NotKnown(f"models of type {error} have no description") from error


def _family(settings: Settings) -> Family:
    family = family_of(settings)
    if family is None:
        raise NotKnown(f"models of type '{settings['model_type']}' have no description")
    return family


def _length(settings: Settings, family: Family, options: EngineOptions) -> int:
    limit = context_length(settings)
    facts = family.facts(settings)
    has_attention = len(facts.without_attention) < facts.num_layers
    refuse_longer(options.max_model_len, limit if has_attention else MOST_POSITIONS)  # states don't depend on positions
    return options.max_model_len or limit


def _dtype(stored: torch.dtype, options: EngineOptions, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    return suitable_dtype(stored, device)


def _library(dtype: torch.dtype, options: EngineOptions, device: torch.device) -> Library | None:
    """Load native code for a dtype. Return None without --compile, and for other devices. Raises BuildError."""
    if options.compile and device.type == "cpu":
        return Library(dtype)
    return None


def _generation(source: ModelSource) -> Mapping[str, Any]:
    path = source.folder / GENERATION
    if not path.is_file():
        return {}
    try:
        return source.checkpoint.object(GENERATION)
    except BadFile as error:
        raise StartupError(f"'{path}' cannot be used: {error}.") from error


def _with_cache(spec: ModelSpec, decoder: Decoder, library: Library | None, options: EngineOptions) -> Described:
    """Return the model with the form of KV cache that its device uses: latent vectors where possible. On a GPU that
    isn't possible with adapters, which change the products that make keys and values from them."""
    width = _latent_width(decoder) if spec.is_on_cpu or not options.has_adapters else 0
    if width and options.kv_cache_dtype != "auto":
        raise StartupError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is for keys and values, in place of which the KV cache of "
            f"'{spec.name}' has latent vectors, of {width} numbers for a token and layer."
        )
    if width:
        spec = spec.with_latent_cache(width)
    else:
        if not spec.is_on_cpu:
            spec = spec.with_latent_cache(0)
        spec = spec.with_cache(options.kv_cache_dtype)
    decoder = with_shapes(decoder, spec)
    return Described(spec, replace(decoder, layers=[with_key_sizes(layer) for layer in decoder.layers]), library)


def with_shapes(decoder: Decoder, spec: ModelSpec) -> Decoder:
    """Return the decoder with the shapes of keys and values in the spec."""
    layers = []
    for number, layer in enumerate(decoder.layers):
        attention = layer.attention
        if attention is not None:
            owner = number if attention.cache_of is None else attention.cache_of
            layer = replace(layer, attention=replace(attention, shape=spec.kv_shapes[owner]))
        layers.append(layer)
    return replace(decoder, layers=layers)


def _latent_width(decoder: Decoder) -> int:
    for layer in decoder.layers:
        attention = layer.attention
        if attention is not None and isinstance(attention.qkv, LatentProjection):
            rank = len(attention.qkv.norm.weight)
            return latent_dim(rank, len(attention.qkv.down.weight) - rank, attention.shape)
    return 0
