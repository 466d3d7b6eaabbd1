"""Starts a model whose weights are in blocks: the native step alone, which multiplies with them.

They are the blocks of a GGUF file, or of experts in MXFP4, or the integers of a checkpoint that was quantized before
(AWQ, GPTQ and others), or are made here of a checkpoint's weights (--quantize).

transformers' code needs weights that are expanded. So a small model is: a layer of each kind and the last one, with the
first rows of the embedding. The native step of the same layers, in their blocks, must give the same logits. This holds
for all layers of a kind, since they are described and packed alike. Later starts compare with these logits, too.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import Adapter, probe_adapter, refuse_unless_they_fit
from oaiserve.engine.model.checkpoints.empty_model import empty_model, named_parameters
from oaiserve.engine.model.checkpoints.encoded_weights import EncodedWeights
from oaiserve.engine.model.checkpoints.gguf_weights import GgufWeights, NotKept, refuse_unless_whole, scale_frequencies
from oaiserve.engine.model.checkpoints.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.model.checkpoints.packed_weights import PackedWeights
from oaiserve.engine.model.checkpoints.weights import Weights
from oaiserve.engine.model.checkpoints.wrapper import text_config
from oaiserve.engine.model.cpu.blocks import FORMATS, Blocks, ExpertBlocks
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, Decoder, NotKnown
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.reserved import ReservedMemory
from oaiserve.engine.model.device import limit_compiled_shapes, select_device
from oaiserve.engine.model.foreign_layers import share_caches
from oaiserve.engine.model.memory import cpu_sizes
from oaiserve.engine.model.model_config import context_length, is_mxfp4, quantization_of, refuse_longer
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.cache import BLOCK_DTYPES, keeps_blocks, remember_checked
from oaiserve.engine.start.check import Part, refuse_unless_equal
from oaiserve.engine.start.load import config_of, generation_defaults, read_checkpoint
from oaiserve.engine.start.native import refuse_unless_adaptable, transformers_logits, with_native_cache
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.request import Declined, StartRequest
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
_CHECKED_ROWS = 1024  # of the embedding
_EMBEDDINGS = ("model.embed_tokens.weight", "model.embeddings.weight", "backbone.embeddings.weight")
_HEAD = "lm_head.weight"
_LAYER_INPUTS, _INPUT_PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"
# What a configuration may have for each layer by itself.
_OF_LAYERS = ("layer_types", "mlp_layer_types", "no_rope_layers", "intermediate_size", "activation_sparsity_pattern")
# The number of first layers without experts.
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
Kind = tuple[object, ...]  # of a layer: what these have for it, and what it does with the keys and values of others


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
    compared: Part  # with transformers' code
    expected: list[Tensor]  # its logits
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
            *(key, loaded, decoder, kept.expected, kept.compared),
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
        weights = EncodedWeights(folder, library, num_threads, in_4_bits=in_4_bits, of_wrapper=is_wrapped)
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
            log.info("The next start will quantize the weights again, because they are not kept: %s", error)
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
    kinds = _kinds(config)
    embedding = next((name for name in _EMBEDDINGS if name in weights.names()), None)
    if embedding is None:
        raise NotKept("it has no embedding with a name that is known")
    vocab_size = weights.shape(embedding)[0]
    part = Part(sorted({*map(kinds.index, kinds), len(kinds) - 1}), min(_CHECKED_ROWS, vocab_size))
    blocks_of = cache(weights.blocks)  # which may make them, and that takes a while
    known, known_parameters, expected = _ask_transformers(source, config, weights, blocks_of, part, options, reserved)
    # In the part, of the layer that shows what holds for all of its kind.
    places = [part.layers.index(kinds.index(kind)) for kind in kinds]

    def of_all(found: Mapping[int, T]) -> dict[int, T]:
        return {layer: found[place] for layer, place in enumerate(places) if place in found}

    names = counted("Packing weights", weights.names(), lambda name: dtype.itemsize * math.prod(weights.shape(name)))
    blocks = {parameter: found for parameter in names if (found := blocks_of(parameter)) is not None}
    others = {parameter: weights.tensor(parameter) for parameter in weights.names() if parameter not in blocks}
    # The native step has norms and biases in float32.
    _fill(model, {parameter: t.to(dtype) if t.dim() > 1 else t.float() for parameter, t in others.items()})
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
    if has_adapters:
        refuse_unless_adaptable(model, decoder)
    num_blocks, most_states = cpu_sizes(loaded, options)
    torch.set_num_threads(NativeDecoder.torch_threads)
    small = part.decoder(decoder)
    probe = probe_adapter(small.adaptable(), dtype) if has_adapters else None
    refuse_unless_equal(
        NativeDecoder(library, small, num_blocks=1, reserved=reserved, is_passing=True, **sizes),
        part.spec(loaded),
        expected,
        block_size=options.block_size,
        is_quantized=True,
        probe=probe,
    )
    native = NativeDecoder(library, decoder, num_blocks=num_blocks, reserved=reserved, **sizes)
    log.info("The native step is ready, with weights in blocks: %s", _counts(blocks, others))
    return QuantizedModel(loaded, weights, decoder, part, expected, native, num_blocks, most_states)


def _ask_transformers(
    source: ModelSource,
    config: PreTrainedConfig,
    weights: Weights,
    blocks_of: Callable[[str], Blocks | ExpertBlocks | None],
    part: Part,
    options: EngineOptions,
    reserved: ReservedMemory | None,
) -> tuple[LoadedModel, dict[int, AttentionParameters], list[Tensor]]:
    """Expand a part of the model in reserved memory, and let transformers' code compute it.

    Return the part as it is loaded, what its layers call attention with, and its logits, without an adapter and then
    with one if there may be any.
    """
    layers, rows, dtype = part.layers, part.rows, BLOCK_DTYPES[options.dtype]
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(layers)
    for name, values in _lists(config).items():
        chosen = [values[layer] for layer in layers]
        if list(getattr(small, name)) != chosen:  # some make their list of the number of layers
            setattr(small, name, chosen)
    for name in _leading(config):
        setattr(small, name, sum(layer < getattr(config, name) for layer in layers))
    if sharing := getattr(config, "num_kv_shared_layers", 0):
        small.num_kv_shared_layers = sum(layer >= config.num_hidden_layers - sharing for layer in layers)
    if getattr(config, "vocab_size_per_layer_input", None):
        small.vocab_size_per_layer_input = min(rows, config.vocab_size_per_layer_input)
    if (differing := getattr(config, "_heterogeneity_spec", None)) is not None:  # as the sizes of heads may
        of_layers = differing.per_layer_overrides
        small.per_layer_config = {place: of_layers[layer] for place, layer in enumerate(layers) if layer in of_layers}
    small.vocab_size = rows
    small.pad_token_id = None
    model = _empty_model(small, dtype, weights)
    if source.gguf_file is None and (defaults := generation_defaults(Path(source.location))) is not None:
        model.generation_config = defaults

    tensors: dict[str, Tensor | Blocks] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other, beside the thread that makes the tokenizer
    for name, _ in named_parameters(model):
        name_in_file = part.name_in_whole(name)
        whole: Tensor | Blocks | ExpertBlocks | None = blocks_of(name_in_file)
        whole = whole if isinstance(whole, Blocks) else weights.tensor(name_in_file)
        if name in (*_EMBEDDINGS, _HEAD):
            whole = whole[:rows]
        elif name == _LAYER_INPUTS:
            whole = part.of_layers(whole[:rows], config.num_hidden_layers, dim=1)
        elif name == _INPUT_PROJECTION:
            whole = part.of_layers(whole, config.num_hidden_layers, dim=0)
        tensors[name] = whole
    _fill(model, _expanded(tensors, dtype, reserved))
    torch.set_num_threads(num_threads)

    max_model_len = options.max_model_len or context_length(config)
    loaded = with_native_cache(replace(prepare(model), max_model_len=max_model_len), options)
    refuse_unless_it_fits(loaded.kv_shapes.values(), options.block_size)
    expected, parameters = transformers_logits(loaded, options.block_size)
    if options.has_adapters:
        shapes = adaptable(model)  # the probe is made by the names in the whole model
        of_whole = probe_adapter({part.name_in_whole(name): shape for name, shape in shapes.items()}, dtype)
        probe = Adapter(of_whole.name, {name: of_whole.parts[part.name_in_whole(name)] for name in shapes})
        expected += transformers_logits(loaded, options.block_size, probe)[0]
    return loaded, parameters, expected


def _expanded(
    tensors: Mapping[str, Tensor | Blocks], dtype: torch.dtype, reserved: ReservedMemory | None
) -> dict[str, Tensor]:
    """Return tensors in a dtype. Blocks are expanded into reserved memory if it has room for all of them."""
    blocks = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Blocks)}
    sizes = [math.prod(matrix.shape) for matrix in blocks.values()]
    borrowed = None if reserved is None else reserved.borrow(dtype.itemsize * sum(sizes))
    found = {name: tensor.to(dtype) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if borrowed is None or not blocks:
        return found | {name: matrix.expand(dtype) for name, matrix in blocks.items()}
    rooms = torch.frombuffer(borrowed, dtype=dtype).split(sizes)
    return found | {
        name: matrix.expand(dtype, room.view(matrix.shape))
        for (name, matrix), room in zip(blocks.items(), rooms, strict=True)
    }


def _kinds(config: PreTrainedConfig) -> list[Kind]:
    """Return the kind of each layer. Layers of one kind have the same code and the same parameters of attention.

    A layer whose keys and values others take is of a kind of its own, so that it is among those that are compared.
    """
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * config.num_hidden_layers
    leading = [[layer < getattr(config, name) for layer in range(len(sharing))] for name in _leading(config)]
    return list(zip(*_lists(config).values(), *leading, sharing, strict=True))


def _leading(config: PreTrainedConfig) -> list[str]:
    """Find the settings that are a number of first layers, which differ from those behind them."""
    return [name for name in _FIRST_LAYERS if isinstance(getattr(config, name, None), int)]


def _lists(config: PreTrainedConfig) -> dict[str, list[object]]:
    """Find the settings that have a value for each layer."""
    lists = {name: getattr(config, name, None) for name in _OF_LAYERS}
    return {name: list(values) for name, values in lists.items() if isinstance(values, list | tuple)}


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


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
