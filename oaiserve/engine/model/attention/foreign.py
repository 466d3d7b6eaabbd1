"""Brings paged attention to families whose code does not hand its arguments on, or computes attention by itself.

Layers that drop the arguments of the attention function get them handed over. Attention modules that call no function
get one between their own projections. Layers that take their keys and values from another one share its cache. Whether
a model then computes the same is checked when it is loaded, as for all families.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from oaiserve.engine.model.attention.hook import AttentionCall, paged_attention
from oaiserve.engine.model.attention.rotation import query_factors


class Handed:
    """Holds what the forward that runs was called with, for modules that do not get it."""

    call: AttentionCall
    positions: Tensor  # int64 [T], of its tokens in their sequences

    def take_from(self, model: PreTrainedModel) -> None:
        """Hold the call of each forward of the model from now on."""

        def take(_: Module, __: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
            self.call = arguments["call"]
            (self.positions,) = arguments["position_ids"]

        model.register_forward_pre_hook(take, with_kwargs=True)


def bring_paged_attention(model: PreTrainedModel) -> bool:
    """Change the attention modules of a model where its family needs that.

    Return whether it computes attention by itself, so that it asks transformers for no attention function.
    """
    handed = Handed()
    computes_itself = is_changed = False
    for module in model.modules():
        name = type(module).__name__
        if name in _DROPPING:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (args, {**kwargs, "call": handed.call}), with_kwargs=True
            )
            is_changed = True
        elif name == "Llama4TextAttention":
            is_changed |= _tune_by_positions(module, model, handed)
        elif name in _COMPUTING:
            _COMPUTING[name](module, model, handed)
            is_changed = computes_itself = True
    if is_changed:
        handed.take_from(model)
    return computes_itself


def share_caches(model: PreTrainedModel) -> int:
    """Have layers that take their keys and values from another layer use its cache. Return how many there are."""
    stored: dict[str, int] = {}  # the layer that others take from, by their type
    num_sharing = 0
    for module in model.modules():
        of_layer: Any = module
        if getattr(module, "store_full_length_kv", False):
            stored[of_layer.layer_type] = of_layer.layer_idx
        elif getattr(module, "is_kv_shared_layer", False):
            of_layer.layer_idx = stored[of_layer.layer_type]
            num_sharing += 1
    return num_sharing


# Their layers get all arguments, but call them without those that are not named.
_DROPPING = {"NemotronAttention", "StableLmAttention"}


def _tune_by_positions(attention: Any, model: Any, handed: Handed) -> bool:
    """Have Llama 4 scale queries by their positions; its own code counts from the first token of a step, which may be
    that of another sequence. Return whether it does: in published models, not where all tokens see all before.
    """
    is_tuned = attention.attn_temperature_tuning and not attention.use_rope
    attention.attn_temperature_tuning = False
    config = model.config
    if not is_tuned or bool((query_factors(config, torch.arange(config.attention_chunk_size - 1)) == 1).all()):
        return False

    def scale(_: Module, __: Any, queries: Tensor) -> Tensor:
        return (queries * query_factors(config, handed.positions)[None, :, None]).to(queries.dtype)

    attention.q_proj.register_forward_hook(scale)
    return True


def _gptj(module: Any, _: PreTrainedModel, handed: Handed) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        out = _attend(module, handed, query.to(value.dtype), key.to(value.dtype), value)
        return out.transpose(1, 2), None

    module._attn = attend


def _gpt_neo(module: Any, model: PreTrainedModel, handed: Handed) -> None:
    window = model.config.window_size if module.attention_type == "local" else None
    module.layer_idx = module.layer_id

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        out = _attend(module, handed, query, key, value, scaling=1.0, sliding_window=window)
        return out.transpose(1, 2), None

    module._attn = attend


def _xglm(module: Any, _: PreTrainedModel, handed: Handed) -> None:
    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = (
            project(hidden_states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        out = _attend(module, handed, query, key, value, scaling=module.scaling)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward


def _falcon(module: Any, model: Any, handed: Handed) -> None:
    code = sys.modules[type(module).__module__]
    # The new architecture repeats each key head for its query heads.
    repeats = module.num_heads // module.num_kv_heads if module.new_decoder_architecture else 1
    slopes = None
    if model.config.alibi:
        biases = code.build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
        slopes = _slopes(biases, model) * module.inv_norm_factor
        model.transformer.use_alibi = False  # its biases would be those of one sequence

    def forward(
        hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> tuple[Tensor, None]:
        query, key, value = module._split_heads(module.query_key_value(hidden_states))
        heads_first = (query, key[:, :, ::repeats], value[:, :, ::repeats])
        query, key, value = (tensor.transpose(1, 2) for tensor in heads_first)
        if slopes is None:
            query, key = code.apply_rotary_pos_emb(query, key, *position_embeddings)
        out = _attend(module, handed, query, key, value, scaling=module.inv_norm_factor, slopes=slopes)
        return module.dense(out.flatten(2)), None

    module.forward = forward


def _bloom(module: Any, model: Any, handed: Handed) -> None:
    build = type(model.transformer).build_alibi_tensor
    slopes = _slopes(build(model.transformer, torch.ones(1, 2), module.num_heads, torch.float32), model)
    model.transformer.build_alibi_tensor = _nothing

    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        scaling = module.inv_norm_factor
        out = _attend(module, handed, query, key, value, scaling=scaling, slopes=slopes)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward


def _mpt(module: Any, model: Any, handed: Handed) -> None:
    build = type(model.transformer).build_mpt_alibi_tensor
    slopes = _slopes(build(model.transformer, module.n_heads, 2), model)
    model.transformer.build_mpt_alibi_tensor = _nothing

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        together = module.Wqkv(hidden_states)
        if module.clip_qkv:
            together = together.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = (
            part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in together.chunk(3, dim=2)
        )
        scaling = module.softmax_scale
        out = _attend(module, handed, query, key, value, scaling=scaling, slopes=slopes)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward


def _attend(module: Module, handed: Handed, query: Tensor, key: Tensor, value: Tensor, **scoring: Any) -> Tensor:
    """Return the result [1, T, heads, dim] for query, key and value [1, heads, T, dim]."""
    return paged_attention(module, query, key, value, None, call=handed.call, **scoring)[0]


def _slopes(alibi: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the slopes [heads] of the biases [heads, 1, 2] of two neighbouring keys."""
    biases = alibi.flatten(1).float()
    return (biases[:, 1] - biases[:, 0]).to(model.device)


def _nothing(*_: Any, **__: Any) -> None:
    """Compute no biases in place of a model's own function: its attention no longer reads them."""


_COMPUTING: dict[str, Callable[[Any, Any, Handed], None]] = {
    "BloomAttention": _bloom,
    "CodeGenAttention": _gptj,
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "GPTNeoSelfAttention": _gpt_neo,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
}
