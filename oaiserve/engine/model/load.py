"""Loads a model's weights and limits. Models that are not decoder-only text models are refused with a reason."""

from __future__ import annotations

import copy
import io
import logging
import os
import sys
from collections.abc import Container, Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.quantization_config import Mxfp4Config

from oaiserve.engine.model.attention import LayerCache, StepAttention
from oaiserve.engine.model.attention.foreign import bring_paged_attention, share_caches
from oaiserve.engine.model.attention.hook import ATTENTION, AttentionCall, run_model
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.checkpoints.gguf_config import read_config
from oaiserve.engine.model.checkpoints.gguf_weights import GgufWeights, NotKept
from oaiserve.engine.model.checkpoints.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.model.checkpoints.packed_weights import PackedWeights
from oaiserve.engine.model.checkpoints.weights import Weights
from oaiserve.engine.model.checkpoints.wrapped_names import KEYS
from oaiserve.engine.model.checkpoints.wrapper import bring_layout, text_config
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.device_experts import keep_experts, mxfp4, stacked
from oaiserve.engine.model.gpu.device_matrices import MXFP4_TILE, PackedLinear, joined, of_integers
from oaiserve.engine.model.mixers import MIXERS, bring_states, state_shapes
from oaiserve.engine.model.padded_head import pad_head
from oaiserve.engine.model.parallel.sums import Sums, can_be_taken_over, take_over
from oaiserve.engine.model.rehearsal import difference, prompt, tolerance
from oaiserve.engine.model.spec import KVShape, LayerStateShapes, LoadedModel
from oaiserve.engine.model.split import Member, place, refuse_unless_divisible
from oaiserve.engine.model.states import PartOfStep, States
from oaiserve.errors import StartupError
from oaiserve.model_errors import reported, tensors_named
from oaiserve.model_files import refuse_unless_sound
from oaiserve.model_numbers import BadFile
from oaiserve.quantization import Quantization, read_quantization
from oaiserve.source import ModelSource, find_model

log = logging.getLogger(__name__)

# The parameters whose defaults come from a model's generation_config.json, if it has them.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LENGTH_DEFAULTS = ("max_new_tokens", "max_length")
_KNOWN_LAYER_TYPES = {"chunked_attention", "full_attention", "sliding_attention"}
# Families whose experts transformers does not read, or not of all sizes, from GGUF files.
_EXPERTS_IN_GGUF = {"gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# oneDNN compiles code for each shape of a bfloat16 product, nearly a MiB with all that belongs to it, and keeps it for
# the 1,024 shapes used last; torch keeps as many in a list of its own. A step of another size has about five.
_CODE_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MOST_SHAPES = 128
_MOST_POSITIONS = 2**20  # rotary tables have a row for each, all together a GiB for the largest heads
_PROBE_TOKENS = 8
_PROBE_PARTS = (3, 4, 8)  # the end of a chunk that begins, of a decode, and of a chunk that goes on from a state


def select_device(name: str) -> torch.device:
    """Return the torch device of this name; `auto` is CUDA if torch sees a GPU. Raises StartupError if it sees none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch sees no CUDA device here; use --device cpu, or install a CUDA build.")
    return torch.device(name)


def load_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int | None = None,
    offline: bool = False,
    member: Member | None = None,
) -> LoadedModel:
    """Load a model from a folder, a hub id or a GGUF file.

    With `offline`, a model given by a hub id must be in the hub's cache. With `member`, only that member's part is
    loaded. Raises StartupError with a message for the user, if possible before the weights are loaded.
    """
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    source = find_model(model)
    is_gguf = source.gguf_file is not None
    # Code that comes with a model never runs, and nobody is asked about it at the terminal.
    arguments: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": False}
    if is_gguf:
        arguments["gguf_file"] = source.gguf_file
    target = select_device(device)
    limit_compiled_shapes()
    distributed: dict[str, Any] = {}
    if member is not None:
        target = place(target, member)
    with reported(f"No model could be loaded from '{model}'"):
        config = read_config(source.path) if is_gguf else AutoConfig.from_pretrained(source.location, **arguments)
        if (text := text_config(config)) is not None:
            log.info("'%s' is multimodal (%s): its text model is served, without images", model, config.model_type)
            bring_layout(config)
            config = text
            arguments |= {"config": config, "key_mapping": KEYS}
        refuse_unless_decoder_only(config, str(model))
        quantization = quantization_of(config, str(model))
    refuse_longer(max_model_len, config)
    if member is not None:
        if config.model_type in MIXERS:
            raise StartupError(f"--tensor-parallel is not for '{model}', which has layers that keep a state.")
        refuse_unless_divisible(config, member.size, str(model), is_gguf=is_gguf)
        if quantization is not None and not can_be_taken_over(config):
            raise StartupError(
                f"--tensor-parallel {member.size} is not for the quantized weights of '{model}': what is added up in "
                f"models of type '{config.model_type}' is not behind their linear layers alone."
            )
        member.join(target)
        distributed["distributed_config"] = DistributedConfig(tp_size=member.size)
    torch_dtype = select_dtype(dtype, config, target, is_gguf=is_gguf, for_tensor_cores=True)
    if is_gguf and hasattr(transformers, "GgufConfig"):
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    in_mxfp4: Mxfp4Weights | None = None
    if is_mxfp4(config):
        arguments["quantization_config"] = Mxfp4Config(dequantize=True)
        if _keeps_packed(target, member):
            in_mxfp4 = _experts_in_mxfp4(local_folder(source, offline=offline))
    # Only safetensors and GGUF are read. For a model of the Hub that is pickled, transformers would also look for a
    # conversion that anybody can propose there.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    # The progress bars of the GGUF conversion cannot be switched off.
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with reported(f"The weights of '{model}' could not be loaded"), quiet, tensors_named():
        # transformers' types do not know that it returns a pair.
        pair: Any
        if quantization is not None:
            name = str(torch_dtype).removeprefix("torch.")
            folder = local_folder(source, offline=offline)
            packed = PackedWeights(folder, quantization, of_wrapper=text is not None)
            pair = _load_expanded(config, packed, torch_dtype, generation_defaults(folder), **distributed)
        elif in_mxfp4 is not None:
            folder = local_folder(source, offline=offline)
            pair = _load_expanded(
                config, in_mxfp4, torch_dtype, generation_defaults(folder), kept=in_mxfp4.of_experts()
            )
            number = keep_mxfp4(pair[0], in_mxfp4)
            log.info("The weights of '%s' stay in MXFP4 in the experts of %d layers", model, number)
        elif is_gguf and config.model_type in _EXPERTS_IN_GGUF:
            pair = _load_expanded(config, GgufWeights(source.path, config), torch_dtype)
        else:
            pair = AutoModelForCausalLM.from_pretrained(
                source.location,
                dtype=torch_dtype,
                attn_implementation="eager",
                use_safetensors=True,
                weights_only=True,
                output_loading_info=True,
                **arguments,
                **distributed,
            )
    loaded, found = pair
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
        raise StartupError(
            f"'{model}' has no weights for {len(missing)} tensors that its config.json describes, such as {missing[0]}."
        )
    sums = None if member is None else take_over(loaded, member)
    if quantization is not None:
        number = keep_packed(loaded, packed, sums) if target.type == "cuda" else 0
        number_of_layers = keep_packed_experts(loaded, packed) if _keeps_packed(target, member) else 0
        kept = f", except for {number} matrices, which stay as they are" if number else ""
        kept += f", and so do the experts of {number_of_layers} layers" if number_of_layers else ""
        log.info("The weights of '%s', in %s, are expanded to %s%s", model, quantization.name, name, kept)
    if member is None:  # a member's part is loaded on its device
        move(loaded, target, str(model))
        if target.type == "cuda":
            pad_head(loaded)
    with reported(f"'{model}' cannot be served"):
        prepared = prepare(loaded, str(model), sums)
    return prepared if max_model_len is None else replace(prepared, max_model_len=max_model_len)


def quantization_of(config: PreTrainedConfig, name: str) -> Quantization | None:
    """Return how the weights of a checkpoint are packed into integers, if they are. Raises StartupError for a way that
    is not read."""
    try:
        return read_quantization(vars(config))
    except BadFile as error:
        raise StartupError(f"'{name}' cannot be served: {error}.") from error


def is_mxfp4(config: PreTrainedConfig) -> bool:
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "mxfp4"


def local_folder(source: ModelSource, *, offline: bool) -> Path:
    """Return the folder of a model, which is fetched as a whole if it is on the Hub. Raises StartupError."""
    if source.is_local:
        return Path(source.location)
    from huggingface_hub import snapshot_download

    with reported(f"The files of '{source.location}' could not be fetched"):
        # Folders within have the same weights in the forms of other programs.
        folder = snapshot_download(
            source.location,
            allow_patterns=["*.json", "*.safetensors"],
            ignore_patterns=["*/*"],
            local_files_only=offline,
        )
    refuse_unless_sound(find_model(folder))
    return Path(folder)


def generation_defaults(folder: Path) -> GenerationConfig | None:
    """Return what a folder says of how to generate, which transformers reads beside weights that it loads itself."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None


def _load_expanded(
    config: PreTrainedConfig,
    weights: Weights,
    dtype: torch.dtype,
    generation: GenerationConfig | None = None,
    kept: Container[str] = (),
    **distributed: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Make a model of quantized weights, expanded, and say what transformers says of loading it.

    Of the tensors in `kept` it has zeros. `distributed` are transformers' arguments for a model that is split.
    """
    plain = copy.deepcopy(config)
    for key in ("quantization_config", "compression_config"):
        plain.__dict__.pop(key, None)
    tensors = {}
    for name in weights.names():
        tensor = torch.zeros(1, dtype=dtype).expand(weights.shape(name)) if name in kept else weights.tensor(name)
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, found = kind.from_pretrained(
        None,
        config=plain,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
        **distributed,
    )
    if generation is not None:
        model.generation_config = generation
    return model, found


def keep_packed(model: PreTrainedModel, weights: PackedWeights, sums: Sums | None = None) -> int:
    """Let the linear layers of a model have their matrices as a checkpoint packs them, and return how many these are.

    The output matrix is none of them, and no matrix whose groups are not multiples of 32 columns. A member of a model
    that is split has parts, if their groups are whole.
    """
    number, names, head = 0, weights.names(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or module is head:
            continue
        found = weights.matrix(f"{name}.weight") if f"{name}.weight" in names else None
        if found is not None and sums is not None:
            found = sums.part_of(found, name)
        if found is not None and (packed := of_integers(found)) is not None:
            PackedLinear.replace(module, packed.to(module.weight.device))
            number += 1
    return number


def _keeps_packed(device: torch.device, member: Member | None) -> bool:
    """Return whether experts stay packed: on a GPU, those of a model in one piece."""
    return device.type == "cuda" and member is None


def _experts_in_mxfp4(folder: Path) -> Mxfp4Weights | None:
    """Return the weights of a checkpoint whose experts can stay in MXFP4, or None if they have to be expanded."""
    try:
        weights = Mxfp4Weights(folder)
    except (NotKept, BadFile) as error:
        log.info("The experts are expanded: %s", error)
        return None
    if any(weights.shape(name)[1] % MXFP4_TILE for name in weights.of_experts()):
        log.info("The experts are expanded: their columns are no multiples of %d", MXFP4_TILE)
        return None
    return weights


def keep_mxfp4(model: PreTrainedModel, weights: Mxfp4Weights) -> int:
    """Let the experts of a model have their matrices as a checkpoint in MXFP4 has them, and return how many layers."""
    number = 0
    for name, module in model.named_modules():
        if f"{name}.gate_up_proj" not in weights.of_experts():
            continue
        both, down = (
            mxfp4(*weights.codes_and_scales(f"{name}.{part}"), getattr(module, f"{part}_bias").data)
            for part in ("gate_up_proj", "down_proj")
        )
        assert both is not None
        assert down is not None
        keep_experts(module, both, down)
        number += 1
    return number


# The names that checkpoints have for the matrices of one expert: its gate, its up, its down projection.
_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def keep_packed_experts(model: PreTrainedModel, weights: PackedWeights) -> int:
    """Let experts have their matrices as a checkpoint packs them, if all of a layer are packed alike in groups of
    multiples of 32 columns. Return of how many layers these are."""
    number, names = 0, weights.names()
    for name, module in model.named_modules():
        tensor = module._parameters.get("gate_up_proj")
        if tensor is None or tensor.dim() != 3 or not getattr(module, "is_concatenated", False):
            continue
        own = name, name.replace(".mlp.", ".block_sparse_moe.")
        for base, parts in product(own, _EXPERT_NAMES):
            if f"{base}.0.{parts[0]}.weight" not in names:
                continue
            experts = [[weights.matrix(f"{base}.{i}.{part}.weight") for part in parts] for i in range(len(tensor))]
            packed = [[None if one is None else of_integers(one) for one in expert] for expert in experts]
            both = [joined([gate, up]) if gate and up else None for gate, up, _ in packed]
            found = [stacked(matrices) for matrices in (both, [down for *_, down in packed])]
            if found[0] is not None and found[1] is not None:
                keep_experts(module, found[0], found[1])
                number += 1
            break
    return number


def limit_compiled_shapes() -> None:
    """Limit the code that is kept for a CPU, unless the user has set a limit. Both libraries read theirs when they
    first compute in bfloat16."""
    for variable in _CODE_LIMITS:
        os.environ.setdefault(variable, str(_MOST_SHAPES))


def move(model: PreTrainedModel, device: torch.device, name: str) -> None:
    """Move the model to the device. Raises StartupError if the device has no room for the weights."""
    if device.type == "cpu":
        model.to(device)  # type: ignore[arg-type]
        return
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    try:
        free, total = torch.cuda.mem_get_info(device)
        model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"The weights of '{name}' take {needed / 2**30:.1f} GiB in {str(model.dtype).removeprefix('torch.')}, but "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB were free on {device}: end what else uses this GPU "
            "(nvidia-smi lists it), or take a smaller --dtype, more GPUs (--tensor-parallel) or another --device."
        ) from error
    except RuntimeError as error:  # for example, other programs have left no memory for CUDA itself
        raise StartupError(f"--device {device}: CUDA does not start there: {_first_sentence(error)}") from error


def prepare(model: PreTrainedModel, name: str = "the model", sums: Sums | None = None) -> LoadedModel:
    """Switch a loaded model to paged attention, after checking that it still computes the same logits.

    `sums` are those of a model that is split.
    """
    model.eval()
    refuse_unless_decoder_only(model.config, name)
    _fix_rotary_frequencies(model)
    size = 1 if sums is None else sums.size
    kv_shapes, states = _probe_attention(model, name, _rows(model.get_input_embeddings()) * size)
    config = model.config
    defaults = model.generation_config.to_diff_dict() if model.generation_config else {}
    loaded = LoadedModel(
        name=type(model).__name__,
        model=model,
        device=model.device,
        dtype=model.dtype,
        vocab_size=_rows(model.get_output_embeddings()) * size,
        max_model_len=context_length(config),
        eos_token_ids=_ids(config.eos_token_id) | _ids(getattr(model.generation_config, "eos_token_id", None)),
        default_params=_default_params(defaults),
        kv_shapes=kv_shapes,
        state_shapes=states,
        sums=sums,
    )
    if states:
        _refuse_unless_equal_in_parts(loaded, name)
    return loaded


def _default_params(given: Mapping[str, Any]) -> dict[str, float | int]:
    lengths = {key: given[key] for key in LENGTH_DEFAULTS if isinstance(given.get(key), int) and given[key] > 0}
    return {key: given[key] for key in SAMPLING_DEFAULTS if given.get(key) is not None} | lengths


def refuse_unless_decoder_only(config: PreTrainedConfig, name: str) -> None:
    """Raise StartupError for a model that is not a decoder-only text model, or keeps what no cache here holds."""
    architecture = (config.architectures or [""])[0]
    problem = None
    if "/" in str(config._attn_implementation):
        problem = f"it names code from the Hub for its attention ({config._attn_implementation})"
    elif config.is_encoder_decoder:
        problem = "it is an encoder-decoder model"
    elif config.model_type == "mllama":
        problem = (
            "its text model has layers for images among its own; without them it is that of Llama 3.1, which is served"
        )
    elif set(config.sub_configs) & {"vision_config", "audio_config"}:
        problem = "it takes images or audio"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = f"transformers has no text generation model of type '{config.model_type}'"
    elif architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        problem = f"its architecture is {architecture}"
    elif config.model_type in MIXERS:
        problem = None  # whatever its layers keep is seen when it is loaded
    elif not set(getattr(config, "layer_types", None) or ()) <= _KNOWN_LAYER_TYPES:
        kinds = ", ".join(sorted(set(config.layer_types)))
        problem = f"it has layers that keep neither a plain KV cache nor a state of a known kind ({kinds})"
    if problem:
        raise StartupError(f"'{name}' cannot be served: {problem}; oaiserve serves decoder-only text models.")


def refuse_longer(max_model_len: int | None, config: PreTrainedConfig) -> None:
    """Raise StartupError for requests that may be longer than the model is good for."""
    limit = context_length(config) if _has_attention(config) else _MOST_POSITIONS  # states know no positions
    if max_model_len is not None and max_model_len > limit:
        raise StartupError(f"--max-model-len is {max_model_len}, but the model is good for {limit} tokens.")


def select_dtype(
    name: str, config: PreTrainedConfig, device: torch.device, *, is_gguf: bool, for_tensor_cores: bool = False
) -> torch.dtype:
    """Return the dtype of this name, or the one that suits the model and the device. With `for_tensor_cores`, a model
    in float32 gets one of 16 bits on a GPU: in float32, its tensor cores are idle, and the KV cache takes twice the
    memory.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if is_gguf:
        return torch.bfloat16  # weights in a GGUF file have a few bits each; its config has no dtype
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if device.type == "cpu":  # float16 is slow there, and its range is narrower than bfloat16's
        return torch.float32 if dtype == torch.float16 else dtype
    if device.type == "cuda" and dtype == torch.float32 and for_tensor_cores:
        half = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        log.info("The model is in float32, and is served in %s: see --dtype", str(half).removeprefix("torch."))
        return half
    return dtype


def context_length(config: PreTrainedConfig) -> int:
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048
    limit = min(int(limit), _MOST_POSITIONS)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            # These scale every position by the longest sequence of the batch, so an answer would depend on other
            # requests.
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        # Within the first chunk, chunked layers see all tokens before. From its last token on, Llama 4 scales queries.
        limit = min(limit, chunk - 1)
    return limit


def _fix_rotary_frequencies(model: PreTrainedModel) -> None:
    """Let rotary embeddings keep their frequencies.

    Those of some types look at the positions of each step, on the device, to choose frequencies by the longest. The
    host would wait for that, and a step that waits cannot be captured. `context_length` allows no length with others.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # by the type of layer
            module.rope_type = {layer: _fixed(of_layer) for layer, of_layer in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = _fixed(kind)  # type: ignore[assignment]


def _fixed(rope_type: str) -> str:
    return "default" if rope_type in _LENGTH_DEPENDENT_ROPE else rope_type


def _has_attention(config: PreTrainedConfig) -> bool:
    return getattr(config, "num_attention_heads", None) is not None or config.model_type not in MIXERS


def _probe_attention(
    model: PreTrainedModel, name: str, vocab_size: int
) -> tuple[dict[int, KVShape], dict[int, LayerStateShapes]]:
    """Switch the model to paged attention and our pool of states, and return the shapes of what its layers keep.

    The logits of a short run must equal those of the model's own code. That excludes what paged attention does not
    support, and layers that do not use it. Raises StartupError for such a model.
    """
    keeps_states = model.config.model_type in MIXERS
    kept: dict[int, LayerStateShapes] = {}
    batch = build_batch(prompt(_PROBE_TOKENS, vocab_size, _PROBE_TOKENS), _PROBE_TOKENS, model.device)
    probe = _Probe(ReferenceAttention(batch))
    if getattr(model.config, "alibi", False):
        model.set_attn_implementation("sdpa")  # in eager attention, transformers' code of Falcon adds ALiBi twice
    with torch.inference_mode():
        output = model(input_ids=batch.input_ids[None], use_cache=keeps_states, logits_to_keep=1)
        expected = output.logits[0]
        if keeps_states:
            kept = state_shapes(output)
            bring_states(model)
            batch.states = States(kept, 1, model.device).of_step([PartOfStep(0, 0, _PROBE_TOKENS)])
        num_sharing = share_caches(model)
        computes_itself = bring_paged_attention(model)
        if not computes_itself and _has_attention(model.config):
            model.set_attn_implementation(ATTENTION)
            if model.config._attn_implementation != ATTENTION:
                raise StartupError(
                    f"'{name}' cannot be served: its code does not use transformers' attention interface."
                )
        try:
            logits = run_model(model, batch, call=AttentionCall(probe, probe, batch.states))
        except TypeError as error:  # the model's code does not pass an argument on, or does not accept it
            raise StartupError(
                f"'{name}' cannot be served: its code does not hand the arguments of paged attention on to its layers."
            ) from error
    shapes = probe.shapes
    num_layers = model.config.num_hidden_layers - num_sharing
    if not keeps_states and len(shapes) != num_layers:
        raise StartupError(
            f"'{name}' cannot be served: only {len(shapes)} of its {num_layers} layers use transformers' attention "
            "interface."
        )
    if probe.is_overwritten:
        raise StartupError(
            f"'{name}' cannot be served: a layer of it keeps keys and values twice, and the cache holds them once."
        )
    found, limit = difference(logits, expected), tolerance(model.dtype)
    if not found <= limit:
        raise StartupError(
            f"'{name}' cannot be served: with paged attention its outputs differ by {found:.1%} from its own "
            f"(allowed: {limit:.1%}), so its attention does something that the interface does not carry."
        )
    return shapes, kept


@torch.inference_mode()
def _refuse_unless_equal_in_parts(loaded: LoadedModel, name: str) -> None:
    """Raise StartupError unless a prompt has the same logits computed at once and in parts.

    Then what each layer needs of the tokens before is in the KV cache or in the state.
    """
    logits = []
    for ends in ((_PROBE_TOKENS,), _PROBE_PARTS):
        eager = EagerExecutor.with_cache(loaded, num_blocks=1, block_size=_PROBE_TOKENS)
        states = States(loaded.state_shapes, 1, loaded.device)
        start = 0
        for end in ends:
            step = prompt(end, loaded.vocab_size, _PROBE_TOKENS, start=start)
            batch = build_batch(step, _PROBE_TOKENS, loaded.device)
            batch.states = states.of_step([PartOfStep(0, start, end - start)])
            computed = eager.forward(batch)
            start = end
        logits.append(computed)
    found, limit = difference(logits[1], logits[0]), tolerance(loaded.dtype)
    if not found <= limit:
        raise StartupError(
            f"'{name}' cannot be served: computed in parts, its outputs differ by {found:.1%} (allowed: {limit:.1%}), "
            "so a layer of it needs more of the tokens before than its keys and values, or its state."
        )


class _Probe(dict[int, LayerCache]):
    """The attention of a step that records the KV shape of each layer, and its caches, of one block each."""

    def __init__(self, attention: StepAttention) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.is_overwritten = False  # whether a layer has called attention with other keys or values than before
        self._attention = attention
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __missing__(self, layer: int) -> LayerCache:
        """Return no cache yet: its shape is known when attention is called, which is next."""
        self._layer = layer
        return LayerCache(torch.empty(0), torch.empty(0))

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, **scoring: Any
    ) -> torch.Tensor:
        before = self._written.setdefault(self._layer, (key, value))
        self.is_overwritten |= not all(torch.equal(*pair) for pair in zip(before, (key, value), strict=True))
        shape = self.shapes[self._layer] = KVShape(key.shape[1], key.shape[2], value.shape[2])
        cache = LayerCache(
            key.new_zeros(1, _PROBE_TOKENS, shape.kv_heads, shape.key_dim),
            value.new_zeros(1, _PROBE_TOKENS, shape.kv_heads, shape.value_dim),
        )
        return self._attention(query, key, value, cache, **scoring)


def _rows(embedding: torch.nn.Module) -> int:
    weight = embedding.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
