"""Adds adapters to the products of transformers' modules, for the rows of a step with adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.loaded import is_linear
from oaiserve.engine.model.plain_adapters import AddTo


def adaptable(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return rows and columns of each linear layer for adapters, by the name of its module.

    Excepted are the output head, layers with only some of a step's tokens, such as experts, and layers whose result is
    not their product, such as some routers.
    """
    head = model.get_output_embeddings()
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if module is head or ".experts." in name:
            continue
        if is_linear(module):
            found[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            found[name] = (module.nf, module.nx)
    return found


@contextmanager
def adapted(model: PreTrainedModel, batch: Batch, way: Callable[[Batch], AddTo]) -> Iterator[None]:
    """Let a batch's adapters, in this `way`, add to the model's modules in calls of this thread."""
    if batch.captured_adapters is not None:
        add_to: AddTo = batch.captured_adapters
        names = set(batch.captured_adapters.modules)
    elif any(batch.adapters):
        add_to = way(batch)
        names = {name for adapter in batch.adapters if adapter is not None for name in adapter.parts}
    else:
        yield
        return
    thread = threading.get_ident()

    def hook_for(name: str) -> Callable[[Module, tuple[Any, ...], Tensor], None]:
        def hook(_: Module, inputs: tuple[Any, ...], out: Tensor) -> None:
            if threading.get_ident() == thread:  # another one may be checking the native step
                add_to(name, inputs[0].flatten(0, -2), out.view(-1, out.shape[-1]))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(hook_for(name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
