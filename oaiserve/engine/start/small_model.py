"""A small model with a layer of each kind of a model, which transformers' code computes in float32.

It shows whether the description of the model is right: in float32, two ways to compute the same agree to the last
digits, so a wrong base of rotary embeddings or another epsilon is not taken for rounding. What holds for a layer holds
for all of its kind, since they have the same code and are described alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import AttentionParameters, Decoder, Layer, NotKnown
from oaiserve.engine.decoder.key_sizes import key_sizes
from oaiserve.engine.decoder.spec import KEY_GROUP, LayerStateShapes
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import Adapter, probe_adapter
from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.reference import Watch, watched
from oaiserve.engine.model.checkpoints.empty_model import empty_model, named_parameters
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.kv_layout import NO_SIZES, refuse_unless_it_fits, rounded
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.model_config import context_length
from oaiserve.engine.start.check import NUM_TOKENS, Checked, Part, batches, refuse_unless_equal
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, INT8_CACHE_TOLERANCE, difference, tolerance
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.prepare import kept_states, prepare, short_windows
from oaiserve.errors import StartupError

MOST_ROWS = 1024  # of the embedding
_LAYER_INPUTS = "model.embed_tokens_per_layer.weight"
_INPUT_PROJECTION = "model.per_layer_model_projection.weight"
# What a configuration may have for each layer by itself.
_OF_LAYERS = ("layer_types", "mlp_layer_types", "no_rope_layers", "intermediate_size", "activation_sparsity_pattern")
# Numbers of layers.
_LAYER_NUMBERS = ("attn_layer_indices", "mlp_only_layers")
# The number of first layers without experts.
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# What differs between layers of one kind.
_OWN_OF_LAYERS = ("cache_of", "factor", "first_row", "module")
_MOST = 0.5  # the largest difference that rounding may explain
_ROUNDINGS = 3  # how much farther than transformers' code in the same dtype the native step may be from float32

Kind = tuple[object, ...]  # of a layer: its settings, and whether it takes the keys and values of others
ReadTensor = Callable[[str], Tensor | Blocks]  # of a parameter, by its name in the whole model


class Reference(NamedTuple):
    """What transformers' code computes of a part of a model."""

    checked: Checked
    loaded: LoadedModel  # the part, switched to paged attention
    parameters: dict[int, AttentionParameters]  # by layer of the part


def kinds_of(config: PreTrainedConfig) -> list[Kind]:
    """Return the kind of each layer. Layers of one kind have the same code and the same parameters of attention.

    A layer whose keys and values others take is of a kind of its own, so that it is among those that are compared.
    """
    sharing = [None] * config.num_hidden_layers
    if getattr(config, "num_kv_shared_layers", 0):
        sharing = getattr(config, "kv_sharing_modes", sharing)
    layers = range(len(sharing))
    leading = [[layer < getattr(config, name) for layer in layers] for name in _leading(config)]
    named = [[layer in numbers for layer in layers] for numbers in _numbers(config).values()]
    return list(zip(*_lists(config).values(), *leading, *named, sharing, strict=True))


def _leading(config: PreTrainedConfig) -> list[str]:
    """Find the settings that are a number of first layers, which differ from the later ones."""
    return [name for name in _FIRST_LAYERS if isinstance(getattr(config, name, None), int)]


def _lists(config: PreTrainedConfig) -> dict[str, list[object]]:
    """Find the settings that have a value for each layer."""
    lists = {name: getattr(config, name, None) for name in _OF_LAYERS}
    return {name: list(values) for name, values in lists.items() if isinstance(values, list | tuple)}


def _numbers(config: PreTrainedConfig) -> dict[str, list[int]]:
    """Find the settings that name layers by their numbers."""
    return {name: numbers for name in _LAYER_NUMBERS if isinstance(numbers := getattr(config, name, None), list)}


def part_of(kinds: list[Kind], vocab_size: int) -> Part:
    """Choose the first layer of each kind, and the last one."""
    return Part(sorted({*map(kinds.index, kinds), len(kinds) - 1}), min(MOST_ROWS, vocab_size))


def part_described(config: PreTrainedConfig, layers: list[Layer], vocab_size: int) -> Part:
    """Choose a layer of each kind of a model whose description is known.

    Where layers of one kind are not described alike, the configuration says what a layer is in settings that are not
    known here. Then it is all layers from the first one on, which any setting means the same in.
    """
    kinds = kinds_of(config)
    outlines = [outline(layer) for layer in layers]
    if all(outlines[kinds.index(kind)] == found for kind, found in zip(kinds, outlines, strict=True)):
        return part_of(kinds, vocab_size)
    return Part(list(range(max(map(outlines.index, outlines)) + 1)), min(MOST_ROWS, vocab_size))


def outline(layer: Any) -> Any:
    """Return the description of a layer with shapes in place of weights: the same for all layers of one kind."""
    if isinstance(layer, Tensor | Blocks):
        return tuple(layer.shape)
    if isinstance(layer, list):
        return [outline(one) for one in layer]
    if is_dataclass(layer):
        names = [field.name for field in fields(layer) if field.name not in _OWN_OF_LAYERS]
        return type(layer).__name__, [outline(getattr(layer, name)) for name in names]
    return layer


def refuse_unless_alike(layers: list[Layer], kinds: list[Kind]) -> None:
    """Raise NotKnown if the description of a layer differs from that of the first layer of its kind."""
    outlines: dict[Kind, Any] = {}
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if outlines.setdefault(kind, found := outline(layer)) != found:
            raise NotKnown(f"its layer {index} is unlike layer {kinds.index(kind)}, though their settings are the same")


def small_config(config: PreTrainedConfig, part: Part) -> PreTrainedConfig:
    """Return the configuration of a part."""
    layers = part.layers
    rows = part.rows
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(layers)
    for name, numbers in _numbers(config).items():
        setattr(small, name, [place for place, layer in enumerate(layers) if layer in numbers])
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
    return small


def small_model(config: PreTrainedConfig, part: Part, read: ReadTensor) -> PreTrainedModel:
    """Make the model of a part, in float32, with the weights that `read` returns, which it expands."""
    model = empty_model(small_config(config, part), torch.float32)
    model.eval()
    tensors: dict[str, Tensor] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the thread that makes the tokenizer runs at the same time
    for name, parameter in named_parameters(model):
        whole = read(part.name_in_whole(name))
        if name == _INPUT_PROJECTION:
            whole = part.of_layers(whole, config.num_hidden_layers, dim=0)
        elif name == _LAYER_INPUTS:
            whole = part.of_layers(whole, config.num_hidden_layers, dim=1)
        if parameter.dim() and len(parameter) < whole.shape[0]:  # by row of the embedding
            whole = whole[: len(parameter)]
        tensors[name] = whole.expand(torch.float32) if isinstance(whole, Blocks) else whole.float()
    torch.set_num_threads(num_threads)
    fill(model, tensors)
    return model


def fill(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model without data these parameters."""
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()


@torch.inference_mode()
def reference_of(
    model: PreTrainedModel, part: Part, name: str, options: EngineOptions, dtype: torch.dtype, *, is_quantized: bool
) -> Reference:
    """Let transformers' code compute the model of a part, whose description is compared with it in float32.

    `options` have the length and the KV cache of the whole model, and `dtype` is that of its native step. Raises
    NotKnown for a model that is described in another way than its code computes it, or that paged attention is not for.
    """
    states = _kept_states(model, dtype)
    length = options.max_model_len or context_length(model.config)
    try:
        prepared = replace(prepare(model, name), max_model_len=length)
    except StartupError as error:  # a slower way may serve it, or refuses it with the same sentence
        raise NotKnown(f"a part of it is refused: {error}".removesuffix(".")) from error
    plain = with_native_cache(prepared, replace(options, kv_cache_dtype="auto"))
    refuse_unless_it_fits(plain.kv_shapes.values(), options.block_size)
    _refuse_unless_described(plain, options)
    loaded = with_native_cache(prepared, options)
    parameters = attention_parameters(loaded, options.block_size)
    expected = transformers_logits(loaded, options.block_size, parameters)
    if options.has_adapters:
        probe = _probe(model, part, dtype)
        expected += transformers_logits(loaded, options.block_size, parameters, probe)
    loaded = replace(loaded, model=_in_dtype(model, dtype), dtype=dtype, state_shapes=states)
    limit = tolerance(dtype, is_quantized=is_quantized)
    if options.kv_cache_dtype == "int8":
        limit = max(limit, INT8_CACHE_TOLERANCE)
    if dtype != torch.float32:
        rounded_logits = transformers_logits(loaded, options.block_size, parameters)
        pairs = zip(rounded_logits, expected, strict=False)  # those without an adapter
        rounding = max(difference(logits, wanted) for logits, wanted in pairs)
        limit = max(limit, min(_ROUNDINGS * rounding, _MOST))
    return Reference(Checked(part, expected, limit), loaded, parameters)


def _refuse_unless_described(loaded: LoadedModel, options: EngineOptions) -> None:
    """Raise NotKnown unless the native step computes what transformers' code does, both in float32."""
    sizes: Any = {"num_blocks": 1, "block_size": options.block_size, "num_threads": 1}
    refuse_unless_described(
        loaded, options.block_size, lambda decoder: NativeDecoder(Library(torch.float32), decoder, **sizes)
    )


def refuse_unless_described(
    loaded: LoadedModel, block_size: int, make: Callable[[Decoder], Executor], probe: Adapter | None = None
) -> None:
    """Raise NotKnown unless an executor of its description computes what transformers' code does, both in float32.

    With a `probe`, they are compared with this adapter, too.
    """
    with short_windows(loaded.model):
        parameters = attention_parameters(loaded, block_size)
        expected = transformers_logits(loaded, block_size, parameters)
        if probe is not None:
            expected += transformers_logits(loaded, block_size, parameters, probe)
    executor = make(describe(loaded, parameters))
    refuse_unless_equal(executor, loaded, expected, FLOAT32_TOLERANCE, block_size=block_size, probe=probe)


def _kept_states(model: PreTrainedModel, dtype: torch.dtype) -> dict[int, LayerStateShapes]:
    """Return the shapes of the states that a model keeps in a dtype: its code chooses those of each state."""
    keeps_states = family_of(model.config.model_type).mixer is not None
    return kept_states(_in_dtype(copy.deepcopy(model), dtype)) if keeps_states else {}


def _in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Round the parameters of a model; rotary frequencies stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _probe(model: PreTrainedModel, part: Part, dtype: torch.dtype) -> Adapter:
    """Return the adapter of the check as float32 computes with it: made by the names that modules have in the whole."""
    shapes = adaptable(model)
    of_whole = probe_adapter({part.name_in_whole(name): shape for name, shape in shapes.items()}, dtype)
    parts = {name: of_whole.parts[part.name_in_whole(name)] for name in shapes}
    return Adapter(of_whole.name, {name: replace(one, a=one.a.float(), b=one.b.float()) for name, one in parts.items()})


@torch.inference_mode()
def attention_parameters(loaded: LoadedModel, block_size: int) -> dict[int, AttentionParameters]:
    """Return what the layers of a model call attention with, by layer."""
    parameters: dict[int, AttentionParameters] = {}

    def record(layer: int, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        scaling, sliding_window, softcap, sinks, looks_ahead = scoring
        parameters[layer] = AttentionParameters(scaling, sliding_window, softcap, sinks is not None, looks_ahead)
        return key, value

    _watching(loaded, block_size, record).forward(batches(loaded, block_size)[0])
    return parameters


@torch.inference_mode()
def transformers_logits(
    loaded: LoadedModel, block_size: int, parameters: dict[int, AttentionParameters], adapter: Adapter | None = None
) -> list[Tensor]:
    """Return transformers' logits of the batches of the check.

    Where the native cache has eight bits, keys and values are rounded to these here, too, keys by the sizes of their
    numbers, which follow from the description.
    """
    has_int8 = any(shape.is_int8 for shape in loaded.kv_shapes.values())
    sizes = key_sizes(describe(loaded, parameters)) if has_int8 else {}

    def round_(layer: int, key: Tensor, value: Tensor, _: Scoring) -> tuple[Tensor, Tensor]:
        if (shape := loaded.kv_shapes[layer]).is_int8:
            return rounded(key, KEY_GROUP, sizes.get(layer, NO_SIZES)), rounded(value, shape.value_dim)
        return key, value

    executor = _watching(loaded, block_size, round_)
    return [executor.forward(batch) for batch in batches(loaded, block_size, adapter)]


def _watching(loaded: LoadedModel, block_size: int, watch: Watch) -> EagerExecutor:
    """Make the executor of transformers' code with room for the batches of the check, with a `watch` on attention."""
    caches = EagerExecutor.with_cache(loaded, num_blocks=-(-NUM_TOKENS // block_size), block_size=block_size).caches
    return EagerExecutor(loaded, caches, watched(caches, watch))
