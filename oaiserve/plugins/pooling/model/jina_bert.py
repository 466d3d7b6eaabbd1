"""Jina's BERT with ALiBi, which transformers does not have: only GGUF files of it are served.

Its modules have the names of the files' tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import BertConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

_MAX_BIAS = 8.0


class JinaBert(PreTrainedModel):
    config_class = BertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.token_embd = Embedding(config.vocab_size, size)
        self.token_types = Embedding(config.type_vocab_size, size)
        self.token_embd_norm = LayerNorm(size, config.layer_norm_eps)
        self.blk = ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> Module:
        return self.token_embd

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> BaseModelOutput:
        if token_type_ids is None:
            types = torch.zeros_like(input_ids)
        else:
            types = token_type_ids
        states = self.token_embd_norm(self.token_embd(input_ids) + self.token_types(types))
        places = torch.arange(input_ids.shape[1], device=states.device)
        distances = (places[:, None] - places[None]).abs()
        bias = -_slopes(self.config.num_attention_heads).to(states)[:, None, None] * distances
        for layer in self.blk:
            states = layer(states, bias)
        return BaseModelOutput(last_hidden_state=states)


class _Layer(Module):
    attn_output: Linear
    attn_q_norm: LayerNorm | None
    attn_k_norm: LayerNorm | None
    attn_norm_2: LayerNorm | None
    attn_output_norm: LayerNorm
    layer_output_norm: LayerNorm

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        width = config.intermediate_size
        parts = set(config.layer_parts)
        self.num_heads = config.num_attention_heads
        self.gates_are_in_ups = config.gates_are_in_ups
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            self.add_module(name, Linear(size, size))
        for name in ("attn_q_norm", "attn_k_norm", "attn_output_norm", "attn_norm_2", "layer_output_norm"):
            self.add_module(name, LayerNorm(size, config.layer_norm_eps) if name in parts else None)
        self.ffn_gate = Linear(size, width) if "ffn_gate" in parts else None
        self.ffn_up = Linear(size, width * (2 if self.gates_are_in_ups else 1))
        self.ffn_down = Linear(width, size)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (getattr(self, f"attn_{part}")(states) for part in "qkv")
        if self.attn_q_norm is not None:
            query = self.attn_q_norm(query)
        if self.attn_k_norm is not None:
            key = self.attn_k_norm(key)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
        attended = self.attn_output_norm(states + self.attn_output(attended))
        if self.attn_norm_2 is not None:
            attended = self.attn_norm_2(states + attended)
        inner = self.ffn_up(attended)
        if self.gates_are_in_ups:
            gates, inner = inner.chunk(2, dim=-1)
            inner = gelu(gates) * inner
        else:
            if self.ffn_gate is None:
                inner = gelu(inner)
            else:
                inner = gelu(self.ffn_gate(attended)) * inner
        normed: Tensor = self.layer_output_norm(attended + self.ffn_down(inner))
        return normed


def _slopes(num_heads: int) -> Tensor:
    """Return each head's slope: powers of one base for the first heads, odd powers of its root for the others."""
    power = 2 ** (num_heads.bit_length() - 1)
    base = 2 ** (-_MAX_BIAS / power)
    root = 2 ** (-_MAX_BIAS / 2 / power)
    return torch.tensor(
        [base ** (head + 1) if head < power else root ** (2 * (head - power) + 1) for head in range(num_heads)]
    )
