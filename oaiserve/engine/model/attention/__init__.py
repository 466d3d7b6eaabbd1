"""The interface of paged attention: what a backend implements, and how transformers' modelling code reaches it.

That code calls `paged_attention` under the name `ATTENTION`. The step's attention and the caches travel to it as
keyword arguments of the model's forward, so nothing is global but the registered name. Each backend has its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from oaiserve.engine.model.batch import Batch

ATTENTION = "oaiserve_paged"


class LayerCache(NamedTuple):
    """One layer's part of the KV cache, in blocks of tokens. A backend may have another layout within a block."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, key_dim]
    values: torch.Tensor  # [num_blocks, block_size, kv_heads, value_dim]


class StepAttention(Protocol):
    """The attention of one step: called once for each layer, it keeps what all layers need of the step's batch."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, heads, key_dim]
        key: torch.Tensor,  # [T, kv_heads, key_dim]
        value: torch.Tensor,  # [T, kv_heads, value_dim]
        cache: LayerCache,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:  # [T, heads, value_dim]
        """Write the step's keys and values into the cache, then let each token attend to its own sequence up to itself.

        With `sliding_window` it attends to the last so many tokens only; `softcap` squashes scores to (-softcap,
        softcap).
        """


Backend = Callable[[Batch], StepAttention]  # prepares the attention of a step


class AttentionCall(NamedTuple):
    """What the attention of every layer needs beside its own tensors."""

    attention: StepAttention
    caches: dict[int, LayerCache]  # by layer index


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, key_dim]
    key: torch.Tensor,  # [1, kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    call: AttentionCall,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention in the form of transformers' attention functions.

    The mask is not used: causality, windows and sequence bounds follow from the batch.
    """
    out = call.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        call.caches[module.layer_idx],  # type: ignore[index]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)


def run_model(model: PreTrainedModel, batch: Batch, **arguments: Any) -> torch.Tensor:
    """Return the logits [R, vocab] of `batch.logits_rows`. `arguments` travel to the attention function."""
    # The 4-dimensional mask is a dummy: it keeps transformers from building one, and from looking (with a read-back
    # from the device) for sequence bounds that the batch knows.
    logits: torch.Tensor = model(
        input_ids=batch.input_ids[None],
        position_ids=batch.positions[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=batch.input_ids.device),
        logits_to_keep=batch.logits_rows,
        use_cache=False,
        **arguments,
    ).logits
    return logits[0]
