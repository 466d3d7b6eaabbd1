"""Starts a model that turns texts into vectors or scores, packed if that computes the same. It has no KV cache."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)

from oaiserve.checkpoints.gguf import GgufHead
from oaiserve.checkpoints.hub import local_source
from oaiserve.checkpoints.load_errors import reported, tensors_named
from oaiserve.checkpoints.quantization import refuse_costly_patterns
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.context_length import refuse_longer
from oaiserve.engine.model.device import move, select_device
from oaiserve.engine.model.model_config import context_length, select_dtype
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import OF_WEIGHTS, config_of
from oaiserve.engine.start.request import StartRequest, needing_native
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from oaiserve.engine.types.pooling import Pooling, Task
from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model.attention import PACKED
from oaiserve.plugins.pooling.model.files import PoolingFiles, find_file, read_files, read_json, read_score_files
from oaiserve.plugins.pooling.model.gguf import load_gguf_pooler
from oaiserve.plugins.pooling.model.heads import Head, embedding_head, load_dense, score_activation, score_head
from oaiserve.plugins.pooling.model.linear import pack_linears
from oaiserve.plugins.pooling.model.packed_check import Unpackable, refuse_unless_equal
from oaiserve.plugins.pooling.model.pooler import Forward, LoadedPooler, OwnForward, PackedForward, PoolingRunner
from oaiserve.plugins.pooling.model.token_heads import load_token_heads, pickled_layers
from oaiserve.system_cpus import default_threads

log = logging.getLogger(__name__)

Text = tuple[list[int], list[int]]  # token ids and their types

_PROBE_TOKENS = (5, 19, 19, 160)  # tokens of the check's texts
# The last text is longer than the window of a model's attention: EmbeddingGemma's tokens see 256 on each side. To check
# a longer window would delay the start too much.
_MOST_WINDOW = 1024
_BEYOND_WINDOW = 32


def start(request: StartRequest) -> ServedModel:
    source = request.source
    task = request.task
    options = request.options
    if options.has_adapters:
        raise StartupError(
            f"{options.adapters_flag} is for models that generate text, and '{source.path}' is for --task {task}."
        )
    pooler = request.load("weights", partial(load_pooler, source.path, task, options))
    model = pooler.model
    dtype = str(model.dtype).removeprefix("torch.")
    log.debug(
        "%s on %s in %s, for --task %s: up to %d tokens a text",
        type(model).__name__,
        model.device,
        dtype,
        pooler.pooling.task,
        pooler.max_model_len,
    )
    on_cpu = model.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(options.cpu_threads or default_threads())
    return ServedModel(
        tokenizer=request.tokenizer,
        runner=PoolingRunner(pooler, request.tokenizer.special_ids),
        num_blocks=0,
        max_model_len=pooler.max_model_len,
        vocab_size=pooler.vocab_size,
        max_step_tokens_default=CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS,
        device=str(model.device),
        dtype=dtype,
        pooling=pooler.pooling,
    )


def load_pooler(model: str | Path, task: Task, options: EngineOptions) -> LoadedPooler:
    """Load a model for `embed` or `score`. Raises StartupError with a message for the user."""
    _refuse_unless_possible(task, options)
    source = local_source(model)
    device = select_device(options.device)
    with reported(f"No model could be loaded from {source.shown}"):
        config = config_of(source)
        if source.gguf_file is not None:
            return _cut(_load_gguf(source.checkpoint.head, config, device, task, options), options)
        refuse_costly_patterns(config.to_dict())
        files = read_files(source) if task == "embed" else read_score_files(source)
    kind: Any = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
    if task == "score":
        kind = AutoModelForSequenceClassification
    with reported(f"The weights of '{model}' could not be loaded"), tensors_named():
        loaded, report = kind.from_pretrained(
            source.location,
            dtype=select_dtype(options.dtype, config, device, is_gguf=False),
            attn_implementation="eager",
            **OF_WEIGHTS,
        )
        dense = [
            load_dense(
                read_json(source, f"{folder}/config.json") or {},
                find_file(source, f"{folder}/model.safetensors"),
                source.location,
            )
            for folder in files.dense_folders
        ]
    # The layer on BERT's first token is for classification, and many embedding models lack it.
    missing = sorted(name for name in report["missing_keys"] if task == "score" or not name.startswith("pooler."))
    if missing:  # transformers fills them with random numbers
        raise StartupError(
            f"'{model}' has no weights for {len(missing)} of the tensors that --task {task} needs, such as "
            f"{missing[0]}."
        )
    move(loaded, device, str(model))
    with reported(f"'{model}' cannot be served for --task {task}"):
        pooler = prepare_pooler(loaded, task, files, dense, str(model), pack=options.compile)
    if task == "embed":
        pooler = _with_token_heads(pooler, source.folder)
    return _cut(pooler, options)


def _with_token_heads(pooler: LoadedPooler, folder: Path) -> LoadedPooler:
    """Return the model with the layers that its folder has for tokens. Raises StartupError."""
    for command in pickled_layers(folder):
        log.warning(
            "'%s' has a layer for tokens that is a pickle, which is not opened. This converts it: %s", folder, command
        )
    size = pooler.pooling.token_size
    assert size is not None
    heads = load_token_heads(folder, size, pooler.model.device)
    if heads.vectors is not None:
        size = heads.vectors.out_features
    pooling = replace(pooler.pooling, has_token_weights=heads.weights is not None, token_size=size)
    return replace(pooler, token_heads=heads, pooling=pooling)


def _load_gguf(
    head: GgufHead, config: PreTrainedConfig, device: torch.device, task: Task, options: EngineOptions
) -> LoadedPooler:
    """Load a GGUF file, in float32 as llama.cpp computes unless the user says otherwise."""
    path = head.paths[0]
    if options.dtype == "auto":
        dtype = torch.float32
    else:
        dtype = select_dtype(options.dtype, config, device, is_gguf=True)
    gguf_pooler = load_gguf_pooler(head, config, dtype, task)
    if (gguf_pooler.score_head is not None) != (task == "score"):
        raise StartupError(f"'{path}' cannot be served for --task {task}: its metadata name another one.")
    move(gguf_pooler.model, device, str(path))
    files = PoolingFiles(gguf_pooler.mode)
    activation = torch.nn.Identity() if gguf_pooler.gives_probabilities else torch.nn.Sigmoid()
    rank = None if gguf_pooler.score_head is None else (gguf_pooler.score_head, activation)
    pooler = prepare_pooler(
        gguf_pooler.model, task, files, gguf_pooler.dense, str(path), pack=options.compile, rank=rank
    )
    return replace(pooler, pooling=replace(pooler.pooling, pair_template=gguf_pooler.pair_template))


def _cut(pooler: LoadedPooler, options: EngineOptions) -> LoadedPooler:
    """Limit the length of texts to the user's, if there is one."""
    if options.max_model_len is None:
        return pooler
    if "max_model_len" in options.inherited:
        return replace(pooler, max_model_len=min(options.max_model_len, pooler.longest))
    refuse_longer(options.max_model_len, pooler.longest)
    return replace(pooler, max_model_len=options.max_model_len)


def prepare_pooler(
    model: PreTrainedModel,
    task: Task,
    files: PoolingFiles | None = None,
    dense: list[torch.nn.Module] | None = None,
    name: str = "the model",
    *,
    pack: bool = True,
    rank: tuple[Head, torch.nn.Module] | None = None,
) -> LoadedPooler:
    """Switch a model to packed attention and, with `pack`, to packed linear layers, if it computes the same that way.

    Otherwise it runs in transformers' code. `rank` are the head and the activation of scores, where the model has none
    of its own. Raises StartupError for a model that has no vector or score.
    """
    files = files or PoolingFiles()
    config = model.config
    model.eval()
    layers: Any = model.base_model if task == "score" else model
    activation: torch.nn.Module | None = None
    head: Head | None = None
    if rank is not None:
        head, activation = rank
    elif task == "score":
        if config.num_labels != 1:
            raise StartupError(
                f"'{name}' cannot be served for --task score: it has {config.num_labels} labels, not 1, so it sorts "
                "texts into classes. Serve a reranker instead, such as BAAI/bge-reranker-base."
            )
        activation = score_activation(config, name, files.activation)
    else:
        is_causal = any(getattr(module, "is_causal", False) for module in layers.modules())
        mode = files.mode or ("lasttoken" if is_causal else "mean")
        if files.mode:
            why = "as its files say"
        else:
            why = "because its files do not say how"
        log.debug("The vectors of %s are pooled by %s, %s", name, mode, why)
        head = embedding_head(mode, [layer.to(model.device) for layer in dense or []])
    first_position = _first_position(layers)
    longest = context_length(config) - first_position
    parameters = inspect.signature(layers.forward).parameters
    takes_types = "token_type_ids" in parameters and getattr(config, "type_vocab_size", 0) > 1
    own = OwnForward(model, head, takes_types)
    texts = _probes(model, longest, has_types=takes_types)
    forward: Forward = own
    try:
        if "position_ids" not in parameters:
            raise Unpackable("its code takes no positions")
        if head is None and not {"score", "classifier"} & model._modules.keys():
            raise Unpackable(f"the head of {type(model).__name__} is not known")
        packed = PackedForward(layers, head or score_head(model), first_position, takes_types)
        _refuse_unless_packable(model, packed, own, texts)
    except Unpackable as error:
        log.warning("'%s' computes one text at a time, which is slower: %s", name, error)
    else:
        forward = packed
        if getattr(layers, "pooler", None) is not None:
            layers.pooler = None  # the head has it, or it is not used
        model.set_attn_implementation(PACKED)
        if pack:
            pack_linears(layers, model.device, model.dtype)
    pooling = Pooling("score", 1, default_prompt=files.default_prompt)
    if task == "embed":
        lengths = [len(texts[0][0])]
        with torch.inference_mode():
            hidden = forward.hidden(*texts[0], lengths)
            size = forward.pooled(hidden, lengths).shape[1]
        pooling = Pooling(
            "embed", size, _dimensions(config), files.prompts, files.default_prompt, token_size=hidden.shape[1]
        )
    return LoadedPooler(
        model=model,
        forward=forward,
        activation=activation,
        vocab_size=_vocab_size(model),
        max_model_len=min(longest, files.max_tokens or longest),
        longest=longest,
        pooling=pooling,
    )


def _refuse_unless_packable(model: PreTrainedModel, packed: PackedForward, own: OwnForward, texts: list[Text]) -> None:
    """Raise Unpackable unless the model computes packed texts as each text alone: all hidden states, or the logits of
    a score."""
    ids, types = ([number for text in texts for number in text[part]] for part in (0, 1))
    lengths = [len(text_ids) for text_ids, _ in texts]
    run = packed if own.head is None else packed.hidden
    own_outputs = partial(_output_of, own, texts)
    try:
        refuse_unless_equal(model, partial(run, ids, types, lengths), own_outputs, lengths)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        # The model's code does not pass an argument on, asks for what is not there, or reshapes one text only.
        raise Unpackable(f"its code cannot run packed ({' '.join(str(error).split())})") from error


def _output_of(own: OwnForward, texts: list[Text], index: int) -> torch.Tensor:
    return own.output(*texts[index])


def _refuse_unless_possible(task: Task, options: EngineOptions) -> None:
    """Refuse settings that a model without a KV cache cannot obey."""
    flag = needing_native(options)
    if options.kv_cache_memory is not None:
        flag = "--kv-cache-memory"
    if flag is not None:
        raise StartupError(f"{flag} does not go together with --task {task}: it is for models that generate text.")


def _first_position(layers: torch.nn.Module) -> int:
    """Return the position of a text's first token. RoBERTa and models like it count from after that of padding."""
    embeddings: Any = getattr(layers, "embeddings", None)
    counts_from_padding = hasattr(embeddings, "create_position_ids_from_inputs_embeds")
    if counts_from_padding:
        return int(embeddings.padding_idx) + 1
    return 0


def _dimensions(config: PreTrainedConfig) -> tuple[int, ...] | None:
    """Return the sizes to which vectors may be cut, by the names that vLLM reads in config.json, too."""
    sizes = getattr(config, "matryoshka_dimensions", None)
    if sizes:
        return tuple(sorted(sizes))
    if getattr(config, "is_matryoshka", False):
        return ()
    return None


def _vocab_size(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _probes(model: PreTrainedModel, longest: int, *, has_types: bool) -> list[Text]:
    """Return texts of varied tokens, none of them padding, which some models treat differently.

    With `has_types`, the second half of each text has the type of a second text.
    """
    size = _vocab_size(model)
    padding = model.config.pad_token_id
    lengths = (*_PROBE_TOKENS[:-1], max(_PROBE_TOKENS[-1], _window(model) + _BEYOND_WINDOW))
    ids = [token_id for token_id in ((7 * place + 3) % size for place in range(max(lengths))) if token_id != padding]
    texts = [ids[: min(length, longest)] for length in lengths]
    return [(text, [int(has_types and 2 * place >= len(text)) for place in range(len(text))]) for text in texts]


def _window(model: PreTrainedModel) -> int:
    """Return the window of the model's attention, in tokens on each side; 0 without one, or if it is too long."""
    windows = [getattr(module, "sliding_window", None) for module in model.modules()]
    return max((window for window in windows if isinstance(window, int) and window <= _MOST_WINDOW), default=0)
