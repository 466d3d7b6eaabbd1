"""Describes blocks of attention and an MLP that several layers share, each with low-rank products of its own.

Zamba 2 has them. `describe.py` reads the matrices that they share, and its checks are for these parts, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oaiserve.engine.model.cpu.description import MLP, Attention, LowRank, NotKnown
from oaiserve.engine.model.cpu.module_reader import ModuleReader

_LISTS = ("linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list")


def attention(reader: ModuleReader, index: int, block: Any, shared: Attention) -> Attention:
    """Return the attention of a layer: what it shares, and its own products of queries, keys and values."""
    module = block.self_attn
    if not hasattr(module, _LISTS[0]):
        return shared
    if not isinstance(shared.qkv, list) or len(shared.qkv) != len(_LISTS):
        raise NotKnown("its layers add to queries, keys and values that are projected together")
    own = [_own(reader, index, module, name) for name in _LISTS]
    return replace(shared, qkv=[replace(matrix, own=low) for matrix, low in zip(shared.qkv, own, strict=True)])


def mlp(reader: ModuleReader, index: int, block: Any, shared: MLP) -> MLP:
    """Return the MLP of a layer: what it shares, and its own product of gates and up projections."""
    if shared.gate is None:
        raise NotKnown("its layers add to an MLP without gates")
    own = _own(reader, index, block.feed_forward, "gate_up_proj_adapter_list")
    return replace(shared, gate=replace(shared.gate, own=own), up=replace(shared.up, own=own))


def _own(reader: ModuleReader, index: int, module: Any, name: str) -> LowRank:
    down, up = getattr(module, name)[module.layer_dic[index]]
    return LowRank(reader.matrix(down), reader.matrix(up))
