"""Starts a model whose weights are in blocks: the native step alone, which multiplies with them.

They are the blocks of a GGUF file, or of experts in MXFP4, or the integers of a checkpoint that was quantized before
(AWQ, GPTQ and others), or are made here of a checkpoint's weights (--quantize).

transformers' code needs weights that are expanded, so it computes a part of the model (`small_model.py`). The native
step of the same layers, in their blocks, must give the same logits, in later starts, too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.blocks import FORMATS, Blocks, ExpertBlocks
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.sources.encoded_weights import EncodedWeights
from oaiserve.engine.decoder.sources.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.checkpoints.empty_model import empty_model, named_parameters
from oaiserve.engine.model.checkpoints.gguf_weights import GgufWeights, NotKept, refuse_unless_whole, scale_frequencies
from oaiserve.engine.model.checkpoints.weights import Weights
from oaiserve.engine.model.checkpoints.wrapper import text_config
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.encoder import Encoder
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.reserved import ReservedMemory
from oaiserve.engine.model.device import limit_compiled_shapes, select_device
from oaiserve.engine.model.foreign_layers import share_caches
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.model.model_config import is_mxfp4, quantization_of, refuse_longer
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.cache import BLOCK_DTYPES, keeps_blocks, remember_checked
from oaiserve.engine.start.check import Checked, refuse_unless_as_checked, refuse_unless_finite
from oaiserve.engine.start.load import config_of, generation_defaults, read_checkpoint
from oaiserve.engine.start.native import refuse_unless_adaptable
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.small_model import (
    fill,
    kinds_of,
    part_of,
    reference_of,
    refuse_unless_alike,
    small_model,
)
from oaiserve.engine.start.started import Started, assemble, started_on_cpu
from oaiserve.errors import StartupError
from oaiserve.files.load_errors import reported
from oaiserve.files.private import NotPrivate
from oaiserve.files.progress import counted
from oaiserve.files.source import ModelSource

log = logging.getLogger(__name__)
T = TypeVar("T")

# The record takes a while, and new memory. The next start needs it.
REMEMBER_AFTER_SECONDS = 3.0
_EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.weight", "backbone.embeddings.weight")


class Quantized:
    """The start of a model whose weights stay quantized, or are quantized here."""

    name = "with quantized weights"

    def accepts(self, request: StartRequest) -> str | None:
        return reason_to_expand(request.source, request.options)

    def start(self, request: StartRequest) -> ServedModel:
        options = request.options
        try:
            started = request.load("weights and check", partial(start_quantized, request))
        except NotKept as reason:
            request.drop_reserved()
            if options.quantize != "none":
                raise StartupError(
                    f"--quantize {options.quantize} needs the native step, which cannot be used: {reason}."
                ) from reason
            raise Declined(str(reason)) from reason
        return assemble(started, request.tokenizer, options)


def reason_to_expand(source: ModelSource, options: EngineOptions) -> str | None:
    """Find the reason why a model's weights do not stay quantized, or None if they do where its family is known.

    Raises StartupError for --quantize where there is nothing to quantize, or nothing that computes with it.
    """
    if options.quantize != "none":
        name, device = source.gguf_file or source.location, select_device(options.device)
        if _is_quantized(source):
            raise StartupError(
                f"--quantize {options.quantize} is for weights that are not quantized yet; those of '{name}' are, and "
                "stay as they are without the flag."
            )
        if device.type != "cpu":
            raise StartupError(f"--quantize {options.quantize} is for --device cpu; the model is on {device}.")
        return None
    if not keeps_blocks(options):
        return "the options need them expanded"
    return None if _is_quantized(source) else "its files have none"


def _is_quantized(source: ModelSource) -> bool:
    """Decide whether the files of a model have its weights in quantization blocks, or packed so that they can be."""
    if source.gguf_file is not None:
        return True
    with reported(f"No model could be loaded from {source.shown}"):
        config = config_of(source)
        config = text_config(config) or config
        return is_mxfp4(config) or quantization_of(config, source.location) is not None


class QuantizedModel(NamedTuple):
    """The native step of a model in blocks, and what serving needs to know of the model."""

    loaded: LoadedModel  # whose matrices have no data
    weights: Weights
    decoder: Decoder
    checked: Checked
    native: NativeDecoder
    num_blocks: int  # of its KV cache
    num_states: int  # of sequences; 0 if no layer keeps one


def start_quantized(request: StartRequest) -> Started:
    """Load a model and start its native step. Raises as `load_quantized` does.

    For the request's key, the check of a GGUF file is remembered, and so are weights that are quantized here, but only
    some seconds after this returns, so that the first answer does not wait for it.
    """
    options, key = request.options, request.key
    if request.compiling is not None:
        with request.times.part("native code"):
            request.compiling.join()
    kept = load_quantized(request.source, options, keeps_quantized=key is not None, reserved=request.reserved)
    loaded, weights, decoder = kept.loaded, kept.weights, kept.decoder
    sizes: Any = {"num_blocks": kept.num_blocks, "num_states": kept.num_states}
    started = started_on_cpu(kept.native, loaded, options, decoder.adaptable(), **sizes)
    if key is not None:
        remember = partial(
            remember_checked,
            *(key, loaded, decoder, kept.checked),
            after_seconds=REMEMBER_AFTER_SECONDS,
        )
        if isinstance(weights, GgufWeights):
            remember(in_files=weights.places())
        elif isinstance(weights, EncodedWeights) and weights.file is not None:
            remember(quantized=weights.file)
    return started


def _read(
    source: ModelSource, options: EngineOptions, library: Library, num_threads: int, *, keeps_quantized: bool
) -> tuple[PreTrainedConfig, Weights]:
    """Read the configuration of a model, and map its weights. Raises StartupError, NotKept, and what transformers
    raises."""
    _, _, config, quantization, is_wrapped = read_checkpoint(source, source.gguf_file or source.location)
    refuse_longer(options.max_model_len, config)
    if source.gguf_file is not None:
        in_file = GgufWeights(source.path, config)
        if not in_file.has_blocks():
            raise NotKept("it has no quantized weights")
        return config, in_file
    folder, has_mxfp4 = Path(source.location), is_mxfp4(config)
    config.__dict__.pop("quantization_config", None)  # for which transformers wants other packages
    if has_mxfp4:
        return config, Mxfp4Weights(folder)
    weights: EncodedWeights | PackedWeights
    if quantization is None:
        in_4_bits = options.quantize == "int4"
        encode = Encoder(library, num_threads)
        weights = EncodedWeights(folder, encode, in_4_bits=in_4_bits, of_wrapper=is_wrapped)
    else:
        # Longer sums cost more without tiles, because x has two levels for them.
        has_tiles = library.has_integer_tiles()
        weights = PackedWeights(folder, quantization, of_wrapper=is_wrapped, is_long=has_tiles)
        if not weights.has_integers():
            raise NotKept("its weights are floats of 8 bits")
    if weights.names().isdisjoint(_EMBEDDINGS):
        raise NotKept(f"models of type '{config.model_type}' are only known expanded")
    weights.leave_out_beyond({name for name, _ in named_parameters(_empty_model(config, library.dtype, weights))})
    if keeps_quantized and isinstance(weights, EncodedWeights) and options.quantized_cache:
        try:
            weights.write_to_file(options.quantized_cache)
        except (NotPrivate, OSError) as error:
            log.warning("The next start quantizes the weights again, because they could not be stored: %s", error)
    return config, weights


@contextmanager
def _errors_not_kept() -> Iterator[None]:
    """Raise NotKept for what may be wrong with a model, but StartupError as it is."""
    try:
        yield
    except (BuildError, MemoryError, NotKnown) as error:
        raise NotKept(str(error)) from error
    except (NotKept, StartupError):
        raise
    except Exception as error:  # transformers' code, and files, can raise anything
        log.debug("The weights cannot be kept", exc_info=True)
        raise NotKept(f"{type(error).__name__}: {error}") from error


@_errors_not_kept()
@torch.inference_mode()
def load_quantized(
    source: ModelSource,
    options: EngineOptions,
    *,
    keeps_quantized: bool = False,
    reserved: ReservedMemory | None = None,
) -> QuantizedModel:
    """Load a model with its weights in blocks, and check its native step.

    With `keeps_quantized`, those that are quantized here are in a file of the cache if there is room. Raises NotKept
    for a model whose weights have to be expanded, and StartupError if there is no memory for what the options ask for.
    """
    limit_compiled_shapes()
    dtype = BLOCK_DTYPES[options.dtype]
    library = Library(dtype)
    num_threads = options.cpu_threads or default_threads()
    has_adapters = options.has_adapters
    sizes: Any = {"block_size": options.block_size, "num_threads": num_threads, "has_adapters": has_adapters}
    config, weights = _read(source, options, library, num_threads, keeps_quantized=keeps_quantized)
    model = _empty_model(config, dtype, weights)
    refuse_unless_whole(weights, named_parameters(model))
    refuse_unless_they_fit(options.adapters, adaptable(model))
    share_caches(model)
    kinds = kinds_of(config)
    embedding = next((name for name in _EMBEDDINGS if name in weights.names()), None)
    if embedding is None:
        raise NotKept("it has no embedding with a name that is known")
    vocab_size = weights.shape(embedding)[0]
    part = part_of(kinds, vocab_size)
    blocks_of = cache(weights.blocks)  # which may make them, and that takes a while

    def read(name: str) -> Tensor | Blocks:
        found = blocks_of(name)
        return found if isinstance(found, Blocks) else weights.tensor(name)

    small = small_model(config, part, read)
    scale_frequencies(small, weights.rope_factors)
    if (defaults := generation_defaults(Path(source.location))) is not None:
        small.generation_config = defaults
    name = source.gguf_file or source.location
    checked, known, known_parameters = reference_of(small, part, name, options, dtype, is_quantized=True)
    # In the part, of the layer that shows what holds for all of its kind.
    places = [part.layers.index(kinds.index(kind)) for kind in kinds]

    def of_all(found: Mapping[int, T]) -> dict[int, T]:
        return {layer: found[place] for layer, place in enumerate(places) if place in found}

    names = counted("Packing weights", weights.names(), lambda name: dtype.itemsize * math.prod(weights.shape(name)))
    blocks = {parameter: found for parameter in names if (found := blocks_of(parameter)) is not None}
    others = {parameter: weights.tensor(parameter) for parameter in weights.names() if parameter not in blocks}
    # The native step has norms and biases in float32.
    fill(model, {parameter: t.to(dtype) if t.dim() > 1 else t.float() for parameter, t in others.items()})
    if isinstance(weights, PackedWeights):
        weights.give_back()  # whose embedding is mostly in float16, and has been copied
    loaded = replace(
        known,
        model=model,
        vocab_size=vocab_size,
        kv_shapes=of_all(known.kv_shapes),
        state_shapes=of_all(known.state_shapes),
    )
    decoder = describe(loaded, of_all(known_parameters), blocks)
    refuse_unless_alike(decoder.layers, kinds)
    if has_adapters:
        refuse_unless_adaptable(model, decoder)
    num_blocks, most_states = cpu_sizes(loaded, options)
    torch.set_num_threads(NativeDecoder.torch_threads)
    refuse_unless_as_checked(library, decoder, loaded, checked, options, num_threads=num_threads, reserved=reserved)
    native = NativeDecoder(library, decoder, num_blocks=num_blocks, reserved=reserved, **sizes)
    refuse_unless_finite(native, loaded, options.block_size)
    log.debug("The native step is ready, with weights in blocks: %s", _counts(blocks, others))
    return QuantizedModel(loaded, weights, decoder, checked, native, num_blocks, most_states)


def _counts(blocks: Mapping[str, Blocks | ExpertBlocks], others: Mapping[str, Tensor]) -> str:
    """Count the matrices of each format, as text."""
    found: Counter[str] = Counter()
    for matrix in blocks.values():
        parts = [matrix] if isinstance(matrix, Blocks) else [part for expert in matrix for part in expert]
        found.update(FORMATS[part.kind].name for part in parts)
    found["expanded"] = sum(tensor.dim() >= 2 and not name.endswith("bias") for name, tensor in others.items())
    return ", ".join(f"{count} matrices {name}" for name, count in sorted(found.items()) if count)


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype, weights: Weights) -> PreTrainedModel:
    """Make a model without the data of its parameters, whose rotary embeddings are as the files have them."""
    model = empty_model(config, dtype)
    scale_frequencies(model, weights.rope_factors)
    model.tie_weights()
    model.eval()
    return model
