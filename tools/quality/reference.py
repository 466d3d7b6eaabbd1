"""Logits of a model in float32, with its weights expanded: what all other ways to compute it are compared with.

transformers' code computes one layer after the other for the whole text, and only that layer's weights are in memory.
The final hidden states are stored for the next run. Logits are made of them when they are needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from oaiserve.checkpoints.source import ModelSource
from oaiserve.engine.decoder.sources.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.model.model_config import is_mxfp4
from oaiserve.engine.model.transformers_files.empty_model import empty_model, named_parameters
from oaiserve.engine.model.transformers_files.gguf_weights import GgufWeights, scale_frequencies
from oaiserve.engine.start.load import TransformersCheckpoint, read_checkpoint

_LAYER = re.compile(r".*\.layers\.\d+")


class Reference:
    """The logits of a text's tokens in float32."""

    def __init__(self, source: ModelSource, ids: list[int], folder: Path) -> None:
        """Compute the hidden states of all tokens, or read them from `folder`, where they are stored."""
        checkpoint = read_checkpoint(source, source.shown)
        self._model = empty_model(checkpoint.config, torch.float32)
        weights = _weights(checkpoint, self._model)
        if isinstance(weights, GgufWeights):
            scale_frequencies(self._model, weights.rope_factors)
        if not getattr(checkpoint.config, "attn_logit_softcapping", None) and self._model._supports_sdpa:
            self._model.set_attn_implementation("sdpa")  # This needs no memory for scores.
        self._model.tie_weights()
        self._model.eval()
        layers = {name: module for name, module in self._model.named_modules() if _LAYER.fullmatch(name)}
        names = named_parameters(self._model).keys()
        of_layers = {name for name in names for layer in layers if name.startswith(layer + ".")}
        _fill(self._model, weights, {name: name for name in names - of_layers})
        for layer, module in layers.items():
            parts = {name.removeprefix(layer + "."): name for name in names if name.startswith(layer + ".")}
            _fill_while_running(module, weights, parts)
        stored = folder / f"{_digest(source.path, ids)}.npy"
        if stored.exists():
            self._hidden = torch.from_numpy(np.load(stored))
        else:
            with torch.inference_mode():
                inputs = torch.tensor([ids])
                self._hidden = _base_of(self._model)(input_ids=inputs, use_cache=False).last_hidden_state[0]
            folder.mkdir(parents=True, exist_ok=True)
            np.save(stored, self._hidden.numpy())

    def logits(self, rows: list[int]) -> Tensor:
        """Return the logits float32 [rows, vocab] of these positions."""
        hidden = self._hidden[rows][None]
        # The model's own code makes logits of hidden states, with whatever scales and caps them.
        _base_of(self._model).forward = lambda **_: MoeModelOutputWithPast(last_hidden_state=hidden)
        with torch.inference_mode():
            logits: Tensor = self._model(input_ids=torch.zeros(1, len(rows), dtype=torch.int64)).logits[0]
        return logits


def _base_of(model: PreTrainedModel) -> Any:
    """Return the part of a model that has its layers. That of Llama 4 has another name than the model says."""
    return model.model if model.base_model is model else model.base_model


def _weights(checkpoint: TransformersCheckpoint, model: PreTrainedModel) -> GgufWeights | TensorFiles:
    """Map the weights of a checkpoint, which are expanded at each access."""
    _, source, config, quantization, is_wrapped = checkpoint
    if source.gguf_file is not None:
        return GgufWeights(source.checkpoint.head, named_parameters(model))
    if is_mxfp4(config):
        return Mxfp4Weights(source.checkpoint)
    if quantization is not None:
        return PackedWeights(source.checkpoint, quantization, of_wrapper=is_wrapped)
    return TensorFiles(source.checkpoint, of_wrapper=is_wrapped)


def _fill(module: Module, weights: GgufWeights | TensorFiles, names: dict[str, str]) -> None:
    """Load the parameters of a module, given the name in the whole model of each."""
    tensors = {own: weights.tensor(name).to(torch.float32) for own, name in names.items()}
    module.load_state_dict(tensors, strict=False, assign=True)
    if isinstance(module, PreTrainedModel):
        module.tie_weights()


def _fill_while_running(layer: Module, weights: GgufWeights | TensorFiles, names: dict[str, str]) -> None:
    """Give a layer its parameters when it is called, and take them away afterwards."""

    def load(*_: Any) -> None:
        _fill(layer, weights, names)

    def unload(*_: Any) -> None:
        empty = {own: torch.empty_like(tensor, device="meta") for own, tensor in layer.state_dict().items()}
        layer.load_state_dict(empty, strict=False, assign=True)

    hooks: list[Callable[..., Any]] = [layer.register_forward_pre_hook, layer.register_forward_hook]
    for register, act in zip(hooks, (load, unload), strict=True):
        register(act)


def _digest(path: Path, ids: list[int]) -> str:
    """Return a name for the hidden states of these tokens, with this file and this version of transformers."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((stats, ids, transformers.__version__)).encode()).hexdigest()[:32]
