"""Puts the vectors of images and sounds, and their positions by time, height and width, into transformers' code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.loaded import base_of


@contextmanager
def placed(model: PreTrainedModel, batch: Batch) -> Iterator[Batch]:
    """Let the media of a batch take their places in calls of this thread with the batch that this returns.

    Their vectors replace the outputs of the embedding. So what a model does with these later, it does with vectors.
    """
    if batch.media is None and batch.axes is None:
        yield batch
        return
    thread = threading.get_ident()
    hooks = []

    def change(module: Module, output: Callable[[Any, Any], Any]) -> None:
        def hook(_: Module, inputs: tuple[Any, ...], out: Any) -> Any:
            # Another thread may be checking the native step.
            return output(inputs, out) if threading.get_ident() == thread else out

        hooks.append(module.register_forward_hook(hook))

    try:
        if (media := batch.media) is not None:
            rows, vectors = media.rows, media.vectors
            # The ids of images may be outside of the vocabulary. Inputs of layers by token are those of padding.
            batch = replace(batch, input_ids=batch.input_ids.index_fill(0, rows, padding_id(model.config)))
            change(model.get_input_embeddings(), lambda _, out: out.index_copy(1, rows, vectors[None].to(out.dtype)))
            for layer, deep in zip(base_of(model).layers, media.deep, strict=False):
                change(layer, lambda _, out, deep=deep: _added(out, rows, deep))  # type: ignore[misc]
        if batch.axes is not None:
            axes, rotary = batch.axes, base_of(model).rotary_emb
            columns = torch.tensor(model.config.rope_axes * 2, device=axes.device)
            change(rotary, lambda inputs, _: _by_axes(rotary, inputs[0], axes, columns))
        yield batch
    finally:
        for hook in hooks:
            hook.remove()


def padding_id(config: Any) -> int:
    """Return the token whose inputs of layers the tokens of media have."""
    token_id = getattr(config, "pad_token_id", None)
    return token_id if token_id is not None and 0 <= token_id < config.vocab_size else 0


def _added(out: Any, rows: Tensor, deep: Tensor) -> Any:
    hidden = out[0] if isinstance(out, tuple) else out
    hidden = hidden.index_add(1, rows, deep[None].to(hidden.dtype))
    return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


def _by_axes(rotary: Any, hidden: Tensor, axes: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """Return cosines and sines [1, T, numbers], each column by the position on its axis."""
    of_axes = [rotary.forward(hidden, positions[None]) for positions in axes]
    tables = (torch.stack(same) for same in zip(*of_axes, strict=True))  # [3, 1, T, numbers]
    return tuple(table.gather(0, columns.expand(1, *table.shape[1:]))[0] for table in tables)
