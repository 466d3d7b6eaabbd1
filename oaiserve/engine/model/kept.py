"""Starts a model whose weights are in blocks: the native step alone, which multiplies with them.

They are the blocks of a GGUF file, or the integers of a checkpoint that was quantized before (AWQ, GPTQ and others), or
are made here of a checkpoint's weights (--quantize int4).

transformers' code needs weights that are expanded, which is what this is there to avoid. So a small model is expanded:
a layer of each kind and the last one, with the first rows of the embedding. Transformers' code computes it, as it does
any other model, and the native step of the same layers, in their blocks, must give the same logits. What this shows of
a layer holds for all of its kind, since they are described and packed alike.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.blocks import FORMATS, Blocks
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.check import refuse_unless_equal
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, NotKnown
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.start import transformers_logits
from oaiserve.engine.model.gguf_weights import GgufWeights, NotKept, refuse_unless_whole
from oaiserve.engine.model.int4_weights import Int4Weights
from oaiserve.engine.model.load import (
    generation_defaults,
    limit_compiled_shapes,
    local_folder,
    prepare,
    quantization_of,
    refuse_longer,
    refuse_unless_decoder_only,
    select_device,
)
from oaiserve.engine.model.memory import kv_blocks, longest_request
from oaiserve.engine.model.packed_weights import PackedWeights
from oaiserve.engine.model.profiler import TorchProfiler
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel, ModelSpec
from oaiserve.engine.model.started import CPU_STEP_TOKENS, Started
from oaiserve.engine.model.weights import Weights
from oaiserve.engine.model.wrapper import text_config
from oaiserve.errors import StartupError
from oaiserve.model_errors import reported
from oaiserve.source import ModelSource

log = logging.getLogger(__name__)

_CHECKED_ROWS = 1024  # of the embedding
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"\.(\d+)\.")
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def is_kept(source: ModelSource, options: EngineOptions, *, offline: bool = False) -> bool:
    """Return whether the options have a model's weights in blocks, if its family is known.

    Adapters name the modules of transformers' code, which is not there without expanded weights. Raises StartupError
    for --quantize int4 where there is nothing to quantize, or nothing that computes with it.
    """
    is_quantized = source.gguf_file is not None or _has_integers(source, offline=offline)
    if options.quantize == "int4":
        name, device = source.gguf_file or source.location, select_device(options.device)
        if is_quantized:
            raise StartupError(
                f"--quantize int4 is for weights that are not quantized yet; those of '{name}' are, and stay as they "
                "are without the flag."
            )
        if device.type != "cpu":
            raise StartupError(f"--quantize int4 is for --device cpu; the model is on {device}.")
        return True
    on_cpu = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
    return (
        is_quantized
        and on_cpu
        and options.compile
        and options.quantize == "none"
        and options.tensor_parallel == 1
        and not options.has_adapters
        and options.draft_model is None
        and options.dtype in _DTYPES
    )


def _has_integers(source: ModelSource, *, offline: bool) -> bool:
    """Return whether a checkpoint has packed integers, as its config.json says."""
    with reported(f"No model could be loaded from '{source.location}'"):
        config = _config(source, offline=offline)
        text_config(config, source.location)  # refuses integers in a multimodal checkpoint
        return quantization_of(config, source.location) is not None


class _Files(NamedTuple):
    """What the files of a model say."""

    config: PreTrainedConfig
    weights: Weights
    generation_config: GenerationConfig | None


class Kept(NamedTuple):
    """The native step of a model in blocks, and what serving needs to know of the model."""

    loaded: LoadedModel  # whose matrices have no data
    native: NativeDecoder
    num_blocks: int  # of its KV cache


def start_kept(source: ModelSource, options: EngineOptions, *, offline: bool = False) -> tuple[ModelSpec, Started]:
    """Load a model and start its native step. Raises as `load_kept` does."""
    loaded, native, num_blocks = load_kept(source, options, offline=offline)
    started = Started(
        ModelRunner(native, loaded.device, options.block_size),
        num_blocks,
        longest_request(loaded, num_blocks * options.block_size),
        CPU_STEP_TOKENS,
        TorchProfiler(loaded.device),
        ranges=None,
    )
    return loaded, started


def load_kept(source: ModelSource, options: EngineOptions, *, offline: bool = False) -> Kept:
    """Load a model with its weights in blocks, and check its native step.

    Raises NotKept for a model whose weights have to be expanded, and StartupError if there is no memory for what the
    options ask for.
    """
    try:
        return _load(source, options, offline=offline)
    except (BuildError, MemoryError, NotKnown) as error:
        raise NotKept(str(error)) from error
    except (NotKept, StartupError):
        raise
    except Exception as error:  # transformers' code, and files, can raise anything
        log.debug("The weights cannot be kept", exc_info=True)
        raise NotKept(f"{type(error).__name__}: {error}") from error


def _read(source: ModelSource, options: EngineOptions, library: Library, num_threads: int, *, offline: bool) -> _Files:
    """Read the configuration of a model, and map its weights. Raises StartupError, NotKept, and what transformers
    raises."""
    config = _config(source, offline=offline)
    if text_config(config, source.location) is not None:
        raise NotKept("its text model is a part of a multimodal one")
    refuse_unless_decoder_only(config, source.gguf_file or source.location)
    refuse_longer(options.max_model_len, config)
    if source.gguf_file is not None:
        return _Files(config, GgufWeights(Path(source.location) / source.gguf_file, config), None)
    folder, quantization = local_folder(source, offline=offline), quantization_of(config, source.location)
    config.__dict__.pop("quantization_config", None)  # for which transformers wants other packages
    weights: Int4Weights | PackedWeights = (
        Int4Weights(folder, library, num_threads) if quantization is None else PackedWeights(folder, quantization)
    )
    if _EMBEDDING not in weights.names():
        raise NotKept(f"models of type '{config.model_type}' are only known expanded")
    weights.leave_out_beyond({name for name, _ in _named_parameters(_empty_model(config, library.dtype, weights))})
    return _Files(config, weights, generation_defaults(folder))


@torch.inference_mode()
def _load(source: ModelSource, options: EngineOptions, *, offline: bool) -> Kept:
    limit_compiled_shapes()
    dtype = _DTYPES[options.dtype]
    library = Library(dtype, "blocks", native_build=options.native_build)
    num_threads = options.cpu_threads or default_threads()
    sizes: Any = {"block_size": options.block_size, "num_threads": num_threads}
    config, weights, _ = files = _read(source, options, library, num_threads, offline=offline)

    model = _empty_model(config, dtype, weights)
    refuse_unless_whole(weights, _named_parameters(model))
    kinds = _kinds(config)
    shown_by = {kind: kinds.index(kind) for kind in kinds}  # the layer of each kind that is compared
    known = _check(files, sorted({*shown_by.values(), len(kinds) - 1}), library, sizes)

    blocks = {name: found for name in weights.names() if (found := weights.blocks(name)) is not None}
    others = {name: weights.tensor(name) for name in weights.names() if name not in blocks}
    # The native step has norms and biases in float32.
    _fill(model, {name: t.to(dtype) if t.dim() > 1 else t.float() for name, t in others.items()})
    loaded = replace(
        known.loaded,
        model=model,
        vocab_size=weights.shape(_EMBEDDING)[0],
        max_model_len=options.max_model_len or known.loaded.max_model_len,
        kv_shapes={layer: known.loaded.kv_shapes[shown_by[kind]] for layer, kind in enumerate(kinds)},
    )
    parameters = {layer: known.parameters[shown_by[kind]] for layer, kind in enumerate(kinds)}
    decoder = describe(loaded, parameters, blocks)
    num_blocks = kv_blocks(loaded, options, loaded.max_model_len)
    torch.set_num_threads(NativeDecoder.torch_threads)
    native = NativeDecoder(library, decoder, num_blocks=num_blocks, **sizes)
    log.info("The native step is ready, with weights in blocks: %s", _counts(blocks, others))
    return Kept(loaded, native, num_blocks)


class _Known(NamedTuple):
    """The facts that transformers' code has shown of some layers, by the index of each in the whole model."""

    loaded: LoadedModel  # of these layers alone
    parameters: dict[int, AttentionParameters]


def _check(files: _Files, layers: list[int], library: Library, sizes: dict[str, Any]) -> _Known:
    """Compare the native step of some layers with transformers' code. Raises NotKnown if their logits differ."""
    config, weights, generation_config = files
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        small.layer_types = [config.layer_types[layer] for layer in layers]
    small.vocab_size = rows = min(_CHECKED_ROWS, weights.shape(_EMBEDDING)[0])
    small.pad_token_id = None
    model = _empty_model(small, library.dtype, weights)

    tensors, blocks = {}, {}
    for name, _ in _named_parameters(model):
        name_in_file = _LAYER.sub(lambda found: f".{layers[int(found[1])]}.", name)
        kept = weights.blocks(name_in_file)
        if kept is None:
            tensors[name] = weights.tensor(name_in_file)
        if name in (_EMBEDDING, _HEAD):
            kept = None if kept is None else kept[:rows]
            tensors = {key: tensor[:rows] if key == name else tensor for key, tensor in tensors.items()}
        if kept is not None:
            blocks[name] = kept
            tensors[name] = kept.expand()
    _fill(model, {name: tensor.to(library.dtype) for name, tensor in tensors.items()})
    if generation_config is not None:
        model.generation_config = generation_config

    loaded = prepare(model)
    refuse_unless_it_fits(loaded.kv_shapes.values(), sizes["block_size"])
    expected, parameters = transformers_logits(loaded, sizes["block_size"])
    native = NativeDecoder(library, describe(loaded, parameters, blocks), num_blocks=1, **sizes)
    refuse_unless_equal(native, loaded, expected, block_size=sizes["block_size"], is_quantized=True)
    return _Known(
        replace(loaded, kv_shapes={layer: loaded.kv_shapes[i] for i, layer in enumerate(layers)}),
        {layer: parameters[i] for i, layer in enumerate(layers)},
    )


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer. Layers of one kind have the same code and the same parameters of attention."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _config(source: ModelSource, *, offline: bool) -> PreTrainedConfig:
    arguments: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": False}
    if source.gguf_file is not None:
        arguments["gguf_file"] = source.gguf_file
    config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, **arguments)
    return config


def _counts(blocks: Mapping[str, Blocks], others: Mapping[str, Tensor]) -> str:
    """Return how many matrices are in which format, as text."""
    found = Counter(FORMATS[matrix.kind].name for matrix in blocks.values())
    found["expanded"] = sum(tensor.dim() == 2 for tensor in others.values())
    return ", ".join(f"{count} matrices {name}" for name, count in sorted(found.items()) if count)


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype, weights: Weights) -> PreTrainedModel:
    """Make a model without the data of its parameters."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    if weights.rope_factors is not None:
        rotary: Any = model.base_model.rotary_emb
        rotary.inv_freq /= weights.rope_factors
    model.tie_weights()
    model.eval()
    return model


def _named_parameters(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return the parameters that a file has. An output embedding that is the input embedding, it has not."""
    is_tied = model.config.tie_word_embeddings
    return [(name, parameter) for name, parameter in model.named_parameters() if not (is_tied and name == _HEAD)]


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters of a model."""
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
