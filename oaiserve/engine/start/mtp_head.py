"""Loads the layer for multi-token prediction (MTP) that checkpoints of DeepSeek V3 and GLM have behind their last one.

It reads the embedding of the next token and the model's last hidden state, each behind a norm, projected together
(section 2.2 of https://arxiv.org/abs/2412.19437), and is then a layer like the model's others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from oaiserve.config import EngineOptions
from oaiserve.engine.model.checkpoints.tensor_files import TensorFiles
from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import Features, HeadInputs, Matrix, Norm
from oaiserve.engine.model.spec import KVShape, ModelSpec
from oaiserve.engine.start.draft_head import Head, make_head
from oaiserve.engine.start.native import transformers_logits, with_native_cache
from oaiserve.engine.start.prepare import prepare
from oaiserve.errors import StartupError
from oaiserve.files.load_errors import reported

_BEFORE_LAYER = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head")


def load_mtp_head(
    folder: Path, options: EngineOptions, *, spec: ModelSpec, embedding: Tensor | Blocks, num_layers: int
) -> Head:
    """Load the layer from a model's own files, with its embedding [vocab, width].

    Raises StartupError if there is none, or if its weights are quantized.
    """
    files, place, dtype = TensorFiles(folder), f"model.layers.{num_layers}.", spec.dtype
    if f"{place}eh_proj.weight" not in files:
        raise StartupError(
            f"--draft-model mtp: '{spec.name}' has no layer for multi-token prediction in its files (no "
            f"{place}eh_proj.weight)."
        )
    own = {one.removeprefix(place): files.tensor(one) for one in files.names() if one.startswith(place)}
    if not isinstance(embedding, Tensor) or not all(tensor.dtype.itemsize > 1 for tensor in own.values()):
        raise StartupError(
            f"--draft-model mtp: the weights of '{spec.name}' are quantized, those of its layer must not."
        )
    head = own.get("shared_head.head.weight")
    if head is None:
        head = files.tensor("lm_head.weight") if "lm_head.weight" in files else embedding
    weights = {f"model.layers.0.{one}": tensor for one, tensor in own.items() if not one.startswith(_BEFORE_LAYER)}
    weights |= {"model.norm.weight": own["shared_head.norm.weight"], "lm_head.weight": head}
    weights["model.embed_tokens.weight"] = head  # in place of the real one
    with reported(f"--draft-model mtp cannot be used with '{spec.name}'"):
        config = _of_one_layer(folder, has_experts="mlp.gate.weight" in own)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        state = {name: tensor.to(dtype) for name, tensor in weights.items()}
        model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, attn_implementation="eager")
        loaded = with_native_cache(prepare(model, "its layer for multi-token prediction"), options)
        _, parameters = transformers_logits(loaded, options.block_size)
        decoder = replace(describe(loaded, parameters), embedding=embedding.to(dtype))
    fusion = own["eh_proj.weight"].to(dtype).chunk(2, dim=1)
    of_embedding, of_hidden = (
        Norm(own[f"{kind}norm.weight"].float(), None, config.rms_norm_eps, False) for kind in "eh"
    )
    features = Features({}, width=embedding.shape[1])
    inputs = HeadInputs(features, of_embedding, of_hidden, [], [Matrix(part.contiguous(), None) for part in fusion])
    # The features of a token take memory beside its keys and values, as if they were a layer's.
    of_head = replace(loaded, kv_shapes=loaded.kv_shapes | {1: KVShape(1, features.width, 0)})
    make = partial(make_head, decoder=decoder, inputs=inputs, options=options, dtype=dtype)
    return Head(of_head, make, features, torch.arange(len(head)))


def _of_one_layer(folder: Path, *, has_experts: bool) -> Any:
    """Return the model's configuration for its last layer alone."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    config.num_hidden_layers = 1
    own = {"first_k_dense_replace": int(not has_experts), "mlp_layer_types": ["sparse" if has_experts else "dense"]}
    own |= {"layer_types": (getattr(config, "layer_types", None) or [None])[-1:], "num_nextn_predict_layers": 0}
    for name, value in own.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config
