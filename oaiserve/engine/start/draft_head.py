"""Loads a draft head in the EAGLE-3 form: one layer that was trained to guess from a model's own hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, Decoder, Features, HeadInputs, Matrix, Norm
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.spec import KVShape, ModelSpec
from oaiserve.engine.start.prepare import prepare
from oaiserve.errors import StartupError
from oaiserve.files.checkpoint import json_object
from oaiserve.files.load_errors import reported

_LAYER = "midlayer"


class Head(NamedTuple):
    """A head that is loaded: the fields of `DraftWeights` behind the name."""

    spec: ModelSpec
    make: Callable[..., NativeDecoder]
    features: Features
    ids: Tensor


def load_head(
    name: str,
    folder: Path,
    options: EngineOptions,
    *,
    spec: ModelSpec,
    embedding: Tensor | Blocks,
    num_layers: int,
) -> Head:
    """Load the head for a model, with its embedding [vocab, width].

    Raises StartupError if it is for another one, or has another form.
    """
    raw = json_object(folder / "config.json")
    settings = raw | raw.get("transformer_layer_config", {})
    dtype = spec.dtype
    tensors = {_short(one): tensor for path in folder.glob("*.safetensors") for one, tensor in load_file(path).items()}
    wanted = ["fc.weight", "norm.weight", "lm_head.weight", f"{_LAYER}.hidden_norm.weight"]
    wanted += [f"{_LAYER}.self_attn.{kind}_proj.weight" for kind in "qkv"]
    if missing := [one for one in wanted if one not in tensors]:
        raise StartupError(
            f"--draft-model {name} is no EAGLE-3 head with weights in safetensors: it has no {missing[0]}."
        )
    if any(one.startswith("layers.") for one in tensors):
        raise StartupError(f"--draft-model {name} has several layers. Heads of one layer are served.")
    (width, num_features), rows = tensors["fc.weight"].shape, len(tensors["lm_head.weight"])
    of_model = embedding.shape[1]
    if num_features != 3 * of_model:
        raise StartupError(
            f"--draft-model {name} is the head of another model: it reads {num_features} numbers of a token, and the "
            f"model's three hidden states have {3 * of_model}."
        )
    ids = torch.arange(rows) + tensors.pop("d2t", torch.zeros(rows, dtype=torch.int64)).long()
    if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
        raise StartupError(f"--draft-model {name} is the head of another model: it has ids that the model lacks.")
    embedding = tensors.pop("embed_tokens.weight", embedding)
    if not isinstance(embedding, Tensor) or embedding.shape[1] != width:
        raise StartupError(f"--draft-model {name} has no embedding of its own, and the model's has another form.")
    of_head, decoder, of_embedding = _described(name, settings, tensors, dtype, options)
    inputs = HeadInputs(
        features=Features(_products(name, settings, tensors["fc.weight"].to(dtype), num_layers)),
        embedding_norm=_norm(tensors, "input_layernorm", settings),
        hidden_norm=_norm(tensors, "hidden_norm", settings) if settings.get("norm_before_residual") else None,
        qkv=of_embedding,
    )
    if inputs.hidden_norm is not None:
        decoder = replace(decoder, layers=[replace(decoder.layers[0], attention_norm=None)])
    decoder = replace(decoder, embedding=embedding.to(dtype))
    refuse_unless_it_fits(of_head.kv_shapes.values(), options.block_size)
    make = partial(_make, decoder=decoder, inputs=inputs, options=options, dtype=dtype)
    # The features of a token take memory beside its keys and values, as if they were a layer's.
    of_head = replace(of_head, kv_shapes=of_head.kv_shapes | {1: KVShape(1, width, 0)})
    return Head(of_head, make, inputs.features, ids)


def _make(
    *,
    decoder: Decoder,
    inputs: HeadInputs,
    options: EngineOptions,
    dtype: torch.dtype,
    num_blocks: int,
    num_threads: int,
) -> NativeDecoder:
    library = Library(dtype, native_build=options.native_build)
    sizes: Any = {"num_blocks": num_blocks, "block_size": options.block_size, "num_threads": num_threads}
    return NativeDecoder(library, decoder, head=inputs, **sizes)


def _short(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", f"{_LAYER}.")


def _described(
    name: str, settings: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, options: EngineOptions
) -> tuple[ModelSpec, Decoder, list[Matrix]]:
    """Describe the head as a Llama of one layer that reads the hidden state alone, and its matrices of embeddings."""
    own = {"num_hidden_layers": 1, "vocab_size": len(tensors["lm_head.weight"]), "tie_word_embeddings": False}
    for key in ("architectures", "dtype", "torch_dtype", "model_type", "transformers_version"):
        settings.pop(key, None)
    weights, of_embedding = {}, []
    for one, tensor in tensors.items():
        if one.startswith(f"{_LAYER}.") and not one.endswith("hidden_norm.weight"):
            weights["model." + one.replace(f"{_LAYER}.", "layers.0.")] = tensor.to(dtype)
    for kind in "qkv":
        place = f"model.layers.0.self_attn.{kind}_proj.weight"
        embedded, weights[place] = (half.contiguous() for half in weights[place].chunk(2, dim=1))
        of_embedding.append(Matrix(embedded, None))
    weights["model.layers.0.input_layernorm.weight"] = tensors[f"{_LAYER}.hidden_norm.weight"].to(dtype)
    weights["model.norm.weight"], weights["lm_head.weight"] = (
        tensors["norm.weight"].to(dtype),
        tensors["lm_head.weight"].to(dtype),
    )
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]  # in place of the real one
    with reported(f"--draft-model {name} cannot be used"):
        config = LlamaConfig(**settings | own)
        config.attention_bias = any(one.endswith("q_proj.bias") for one in weights)
        # transformers' types do not know that it returns a pair.
        pair: Any = LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        model, found = pair
        if wrong := [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]:
            raise StartupError(f"--draft-model {name} does not fit its config.json: see {sorted(map(str, wrong))[0]}.")
        loaded = prepare(model, name).with_cache(options.kv_cache_dtype)
        parameters = AttentionParameters(loaded.kv_shapes[0].key_dim ** -0.5, None, None)
        return loaded, describe(loaded, {0: parameters}), of_embedding


def _products(name: str, settings: dict[str, Any], fc: Tensor, num_layers: int) -> dict[int, Matrix]:
    """Return the part of `fc` for each of the layers before which hidden states are read."""
    layers = (2, num_layers // 2, num_layers - 3)
    if (named := settings.get("eagle_aux_hidden_state_layer_ids")) is not None:
        layers = tuple(named)
    elif (named := (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")) is not None:
        layers = tuple(layer + 1 for layer in named)  # these are behind layers
    if len(set(layers)) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise StartupError(
            f"--draft-model {name} reads hidden states before the layers {layers}, and the model has {num_layers}."
        )
    return {layer: Matrix(part.contiguous(), None) for layer, part in zip(layers, fc.chunk(3, dim=1), strict=True)}


def _norm(tensors: dict[str, Tensor], name: str, settings: dict[str, Any]) -> Norm:
    return Norm(tensors[f"{_LAYER}.{name}.weight"].float(), None, settings.get("rms_norm_eps", 1e-6), False)
