"""Starts a model with its weights kept in the blocks of its files: the native step alone, which multiplies with these.

The files are one in the format GGUF, or a checkpoint whose experts are in MXFP4.

transformers' code needs weights that are expanded, which is what this is there to avoid. So a small model is expanded:
a layer of each kind and the last one, with the first rows of the embedding. Transformers' code computes it, as it does
any other model, and the native step of the same layers, in their blocks, must give the same logits. What this shows of
a layer holds for all of its kind, since they are described and packed alike.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.blocks import Blocks, ExpertBlocks
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.check import refuse_unless_equal
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, NotKnown
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.start import transformers_logits
from oaiserve.engine.model.gguf_weights import GgufWeights, NotKept, refuse_unless_whole, with_experts
from oaiserve.engine.model.load import (
    limit_compiled_shapes,
    prepare,
    quantization_method,
    refuse_unless_decoder_only,
)
from oaiserve.engine.model.memory import kv_blocks, longest_request
from oaiserve.engine.model.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.model.profiler import TorchProfiler
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel, ModelSpec
from oaiserve.engine.model.started import CPU_STEP_TOKENS, Started
from oaiserve.engine.model.weights import Weights
from oaiserve.errors import StartupError
from oaiserve.model_errors import reported
from oaiserve.source import ModelSource

log = logging.getLogger(__name__)

_CHECKED_ROWS = 1024  # of the embedding
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"\.(\d+)\.")
_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


# Of a checkpoint on the Hub, which may have others in its folders.
_CHECKPOINT_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]


class _Files(NamedTuple):
    """What the files of a model say."""

    config: PreTrainedConfig
    weights: Weights
    generation_config: GenerationConfig | None


def is_kept(source: ModelSource, options: EngineOptions, *, offline: bool = False) -> bool:
    """Return whether the files have blocks, and the options leave them as they are.

    With `offline`, a model on the Hub must be in its cache. Adapters name the modules of transformers' code, which is
    not there without expanded weights.
    """
    on_cpu = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
    return (
        on_cpu
        and options.compile
        and options.quantize == "none"
        and options.tensor_parallel == 1
        and not options.has_adapters
        and options.draft_model is None
        and options.dtype in _DTYPES
        and (source.gguf_file is not None or _is_mxfp4(source, offline))
    )


def _is_mxfp4(source: ModelSource, offline: bool) -> bool:
    """Return whether the experts of a checkpoint are in MXFP4."""
    with reported(f"No model could be loaded from '{source.location}'"):
        config = AutoConfig.from_pretrained(source.location, local_files_only=offline, trust_remote_code=False)
    return quantization_method(config) == "mxfp4"


class Kept(NamedTuple):
    """The native step of a file, and what serving needs to know of the model."""

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
    """Load a model, and check its native step.

    Raises NotKept for a model whose weights have to be expanded, and StartupError if there is no memory for what the
    options ask for.
    """
    try:
        return _load(_read(source, offline), options, source.gguf_file or source.location)
    except (BuildError, MemoryError, NotKnown) as error:
        raise NotKept(str(error)) from error
    except (NotKept, StartupError):
        raise
    except Exception as error:  # transformers' code, and files, can raise anything
        log.debug("The weights cannot be kept", exc_info=True)
        raise NotKept(f"{type(error).__name__}: {error}") from error


def _read(source: ModelSource, offline: bool) -> _Files:
    """Read the configuration of a model, and map its weights. Raises BadFile, NotKept, and what transformers raises."""
    if source.gguf_file is not None:
        path = Path(source.location) / source.gguf_file
        config = with_experts(AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file), path)
        return _Files(config, GgufWeights(path, config), None)
    folder = Path(source.location)
    if not source.is_local:
        folder = Path(snapshot_download(source.location, allow_patterns=_CHECKPOINT_FILES, local_files_only=offline))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    del config.quantization_config  # it says how transformers is to load the weights, which are loaded here
    has_settings = (folder / "generation_config.json").is_file()
    return _Files(config, Mxfp4Weights(folder), GenerationConfig.from_pretrained(folder) if has_settings else None)


@torch.inference_mode()
def _load(files: _Files, options: EngineOptions, name: str) -> Kept:
    limit_compiled_shapes()
    config, weights, _ = files
    refuse_unless_decoder_only(config, name)
    dtype = _DTYPES[options.dtype]
    library = Library(dtype, "blocks", native_build=options.native_build)
    num_threads = options.cpu_threads or default_threads()
    sizes: Any = {"block_size": options.block_size, "num_threads": num_threads}

    model = _empty_model(config, dtype, weights)
    refuse_unless_whole(weights, _named_parameters(model))
    kinds = _kinds(config)
    shown_by = {kind: kinds.index(kind) for kind in kinds}  # the layer of each kind that is compared
    known = _check(files, sorted({*shown_by.values(), len(kinds) - 1}), library, sizes)

    blocks = {parameter: found for parameter in weights.names() if (found := weights.blocks(parameter)) is not None}
    others = {parameter: weights.tensor(parameter) for parameter in weights.names() if parameter not in blocks}
    # The native step has norms and biases in float32.
    _fill(model, {parameter: t.to(dtype) if t.dim() > 1 else t.float() for parameter, t in others.items()})
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
    log.info(
        "The native step is ready, and the weights stay as the files have them: %s",
        ", ".join(f"{count} matrices {kind}" for kind, count in sorted(weights.formats().items())),
    )
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
    if generation_config is not None:
        model.generation_config = generation_config

    tensors: dict[str, Tensor] = {}
    blocks: dict[str, Blocks | ExpertBlocks] = {}
    for name, _ in _named_parameters(model):
        name_in_file = _LAYER.sub(lambda found: f".{layers[int(found[1])]}.", name)
        kept = weights.blocks(name_in_file)
        if isinstance(kept, Blocks):
            kept = kept[:rows] if name in (_EMBEDDING, _HEAD) else kept
            blocks[name], tensors[name] = kept, kept.expand()
            continue
        tensor = weights.tensor(name_in_file)
        tensors[name] = tensor[:rows] if name in (_EMBEDDING, _HEAD) else tensor
        if kept is not None:
            blocks[name] = kept
    _fill(model, {name: tensor.to(library.dtype) for name, tensor in tensors.items()})

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
