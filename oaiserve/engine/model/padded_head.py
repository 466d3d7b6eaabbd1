"""Pads the output head of a model on a GPU, so that each row of logits begins at an aligned address.

A vocabulary of an odd size, such as GPT-2's 50,257, makes matrix products write their rows unaligned, and kernels read
them number by number. A model's logits are a view without the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALIGNMENT = 64  # rows: 128 bytes of logits in bfloat16


def aligned(vocab_size: int) -> int:
    """Return the vocabulary's size with padding."""
    return -(-vocab_size // ALIGNMENT) * ALIGNMENT


def pad_head(model: PreTrainedModel) -> None:
    """Let the output head of a model compute rows of an aligned size, if it is a linear layer and theirs is not."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return
    num_rows, bias = head.out_features, head.bias
    num_more = aligned(num_rows) - num_rows
    if not num_more:
        return
    padded = torch.cat([head.weight.data, head.weight.data.new_zeros(num_more, head.in_features)])
    # Where the head is the input embedding, too, both share this parameter, and the memory stays one.
    head.weight.data = padded[:num_rows]
    padded_bias = None if bias is None else torch.cat([bias.data, bias.data.new_zeros(num_more)])
    head.forward = lambda hidden: linear(hidden, padded, padded_bias)[..., :num_rows]  # type: ignore[assignment,method-assign]
