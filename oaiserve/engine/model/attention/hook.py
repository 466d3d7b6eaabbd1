"""The function by which transformers' modelling code calls paged attention.

transformers looks up `paged_attention` by its registered name, `ATTENTION`. It gets the step's attention and the caches
as keyword arguments of the model's forward, so only that name is global.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel

from oaiserve.engine.model.attention import LayerCache, Scoring, StepAttention
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.states import StepStates

ATTENTION = "oaiserve_paged"


class AttentionCall(NamedTuple):
    """The arguments of `paged_attention` beside a layer's own tensors, and the states of a step."""

    attention: StepAttention
    caches: dict[int, LayerCache]  # by layer index
    states: StepStates | None = None  # which layers that keep one take up
    looks_ahead_in_windows: bool = False  # only in layers with a window do tokens of an image see those behind


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
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention, with the signature of transformers' attention functions.

    The mask is not used: causality, windows and sequence bounds follow from the batch. `s_aux` are the layer's sinks.
    """
    out = call.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        call.caches[module.layer_idx],  # type: ignore[index]
        Scoring(
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window,
            softcap,
            None if s_aux is None else s_aux.float(),
            looks_ahead=sliding_window is not None or not call.looks_ahead_in_windows,
        ),
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)


def run_model(model: PreTrainedModel, batch: Batch, **arguments: Any) -> torch.Tensor:
    """Return the logits [R, vocab] of `batch.logits_rows`. `arguments` are passed on to the attention function."""
    # The 4-dimensional mask is a dummy. It keeps transformers from building a mask, and from searching for sequence
    # bounds, which would be a read-back from the device; the batch has these bounds already.
    logits: torch.Tensor = model(
        input_ids=batch.input_ids[None],
        position_ids=batch.positions[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=batch.input_ids.device),
        logits_to_keep=batch.logits_rows,
        use_cache=False,
        **arguments,
    ).logits
    return logits[0]
