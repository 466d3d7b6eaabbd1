"""The sums and gathers among the members of a tensor-parallel model, in place of transformers' hooks.

A matrix is cut along its rows, so that its product needs nothing, or along its columns, so that products are added up.
The embedding is cut along its rows, and a member adds zeros for the rows of others. The logits are gathered. Each
expert of a mixture is cut like an MLP. Queries, keys and values of one module are cut one by one, and the mean square
of a norm of all heads is that of all members.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Linear, Module, Parameter
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.engine.model.checkpoints.integer_layouts import Floats, Integers, own_rows, part_of
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.group import Member
from oaiserve.errors import StartupError

# The name that torch has had since 2.13, or the one before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
ROWS, COLUMNS = 0, 1
IN_PARTS = "packed_colwise"  # along the rows, gates and ups one by one
EXPERTS = "moe_tp_experts"  # each of a mixture like an MLP
WHOLE = "replicated_with_grad_allreduce"  # transformers cuts nothing
# The styles of transformers' plan, and the dimension along which each cuts weights.
_CUTS = {
    "colwise": ROWS,
    "rowwise": COLUMNS,
    "embedding_rowwise": ROWS,
    "colwise_gather_output": ROWS,
    IN_PARTS: ROWS,
    EXPERTS: None,
    WHOLE: None,
    "mla_kv_a_proj": None,  # makes latent vectors, which all members have; only gradients would be added up
}
# Styles without a gather, in place of transformers', which gathers products and cuts them again.
_UNGATHERED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise"),
    "qkv_proj": WHOLE,  # has uneven parts, which transformers does not cut one by one: that is done here
    "gate_up_proj": IN_PARTS,
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}


class _Cut(NamedTuple):
    dimension: int
    segments: tuple[int, ...] = ()  # numbers of rows, each of which is cut by itself; none: all together


class ElsewhereError(Exception):
    """Another member has failed in work of all members."""

    def __init__(self) -> None:
        super().__init__("another part of the model has a problem with it")


class Sums:
    """The sums of one member. While they are `left_out`, a forward computes this member's shard alone."""

    def __init__(self, member: Member) -> None:
        self.rank, self.size = member.rank, member.size
        self._are_left_out = False
        self._cuts: dict[str, _Cut] = {}  # by the name of the module
        self.norms_all_heads = False  # whether a norm of queries or keys is one of all members' heads

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of the members' tensors, which may be in place of this one."""
        if not self._are_left_out:
            dist.all_reduce(x)
        return x

    def put_together(self, x: Tensor) -> Tensor:
        """Return the members' tensors [..., n] side by side, [..., members * n]. If left out, all are this one."""
        parts = x.new_empty(self.size, *x.shape)
        if self._are_left_out:
            parts.copy_(x)
        else:
            _gather(parts.flatten(0, 1), x.contiguous())
        return parts.movedim(0, -2).flatten(-2)

    def share(self, x: Tensor) -> None:
        """Copy the first member's tensor into that of each other."""
        if not self._are_left_out:
            dist.broadcast(x, src=0)

    def look_up(self, ids: Tensor, own_rows: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
        """Return the rows of an embedding, of which each member has `num_rows`."""
        if self._are_left_out:
            return own_rows(ids % num_rows)  # rows of zeros would show little
        own = ids - self.rank * num_rows
        is_own = (own >= 0) & (own < num_rows)
        return self.add_up(own_rows(own.where(is_own, 0)).masked_fill(~is_own[..., None], 0))

    def normed(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return rows divided by their root mean square over all members, times this member's weights."""
        parts = x.float()
        squares = parts.pow(2).mean(-1, keepdim=True)
        if not self._are_left_out:
            squares = self.add_up(squares) / self.size
        return (weight.float() * parts * torch.rsqrt(squares + epsilon)).to(x.dtype)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Compute without the other members, who need not do the same."""
        self._are_left_out = True
        try:
            yield
        finally:
            self._are_left_out = False

    def all_agree(self, yes: bool) -> bool:
        """Return whether all members say yes. Blocks until all have called it."""
        return group.all_agree(yes)

    def slice(self, matrix: Integers | Floats, cut: int | str) -> Integers | Floats | None:
        """Return this member's slice, cut along a dimension or as its module is; None if it has no whole groups."""
        dimension, segments = self._cuts[cut] if isinstance(cut, str) else _Cut(cut)
        return part_of(matrix, dimension, self.rank, self.size, segments)

    def take_over(self, name: str, module: Any, style: str) -> None:
        """Let a module of transformers' plan compute with its own weights, as plain tensors, and these sums."""
        del module.forward  # transformers' hook
        if style == EXPERTS:
            _keep_local(module)
            module.forward = lambda *given: self.add_up(type(module).forward(module, *given))
            return
        cut = _CUTS[style]
        if cut is None:
            return
        self._cuts[name] = _Cut(cut, (module.out_features // 2,) * 2 if style == IN_PARTS else ())
        _keep_local(module)
        if style == "embedding_rowwise":
            num_rows = len(module.weight)
            module.padding_idx = None  # which may be the row of another member, and is for training
            module.forward = lambda ids: self.look_up(ids, lambda own: type(module).forward(module, own), num_rows)
            return
        # The classes that take the place of Linear have products of their own.
        module.out_features, module.in_features = module.weight.shape
        if cut == COLUMNS:
            if self.rank > 0:
                module.bias = None  # sums have that of the first member, once
            module.forward = lambda x: self.add_up(type(module).forward(module, x))
        elif style == "colwise_gather_output":
            module.forward = lambda x: self.put_together(type(module).forward(module, x))

    def cut_heads(self, name: str, module: Any, attention: Any) -> None:
        """Cut a module of queries, keys and values, and its attention, to this member's heads."""
        config, dim = attention.config, attention.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        segments = heads * dim, kv_heads * dim, kv_heads * dim
        self._cuts[name] = _Cut(ROWS, segments)
        for key, whole in list(module.named_parameters(recurse=False)):
            own = own_rows(whole.data, segments, self.rank, self.size)
            setattr(module, key, Parameter(own, requires_grad=False))
        module.out_features = len(module.weight)
        attention.config = _OfOwnHeads(config, heads // self.size)
        attention.num_key_value_heads = kv_heads // self.size

    def cut_norm(self, norm: Any, width: int) -> None:
        """Cut a norm of all heads to this member's `width`. Raises StartupError unless it is a plain RMS norm."""
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight, rows = norm.weight.data, torch.linspace(-1, 2, len(norm.weight), device=norm.weight.device)
        if epsilon is not None:
            expected = torch.nn.functional.rms_norm(rows, rows.shape, weight.float(), epsilon)
        if epsilon is None or not torch.allclose(norm(rows.to(weight.dtype)).float(), expected, rtol=0.02, atol=0.01):
            raise StartupError(f"--tensor-parallel is not for norms of the kind {type(norm).__name__}.")
        norm.weight = Parameter(weight[self.rank * width :][:width].clone(), requires_grad=False)
        norm.forward = lambda x: self.normed(x, norm.weight, epsilon)
        self.norms_all_heads = True


class _OfOwnHeads:
    """The configuration of a model, with the number of query heads that a member has."""

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config = config
        self.num_attention_heads = num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def split_by_heads(config: PreTrainedConfig) -> None:
    """Cut a model by heads and by gates where transformers' plan gathers the products of all members.

    It does so for one module of queries, keys and values, or of gates and ups, and for a norm of all heads.
    """
    plan = dict(config.base_model_tp_plan or {})
    for name, style in list(plan.items()):
        base, _, last = name.rpartition(".")
        if style in ("colwise_gather_output", "rowwise_split_input"):
            plan[name] = _UNGATHERED.get(last, style)
            if last in ("q_proj", "k_proj"):
                plan[f"{base}.{last[0]}_norm"] = WHOLE
    if needs_only_sums(plan):
        config.base_model_tp_plan = plan  # type: ignore[misc]


def needs_only_sums(plan: dict[str, str] | None) -> bool:
    """Return whether a model's plan needs only sums, behind the matrices cut along columns."""
    return set((plan or {}).values()) <= _CUTS.keys() - {"colwise_gather_output"}


def take_over(model: PreTrainedModel, member: Member) -> Sums | None:
    """Replace transformers' hooks by our sums, or return None for a plan with other hooks, which stay."""
    hooked: dict[str, Module] = {name: module for name, module in model.named_modules() if "forward" in vars(module)}
    styles = {name: model.tp_plan.get(re.sub(r"\d+", "*", name), "") for name in hooked}
    if not needs_only_sums(model.config.base_model_tp_plan) or not set(styles.values()) <= _CUTS.keys():
        for module in model.modules():
            # The head stays as it is: it says how large the vocabulary is.
            if isinstance(module, Linear) and module is not model.get_output_embeddings():
                _keep_local(module)
        if any(_makes_all_heads(name, style) for name, style in styles.items()):
            raise StartupError(
                f"--tensor-parallel is not for '{model.config.model_type}': its head is split in a way "
                f"that is not known, {styles}."
            )
        return None
    sums = Sums(member)
    for name, module in hooked.items():
        sums.take_over(name, module, styles[name])
        attention = model.get_submodule(name.rpartition(".")[0])
        if _makes_all_heads(name, styles[name]):
            sums.cut_heads(name, module, attention)
        elif styles[name] == WHOLE:
            # The projection before a norm of queries or of keys is cut before its norm.
            projection = getattr(attention, f"{name.rpartition('.')[2][0]}_proj", None)
            width = len(projection.weight) if isinstance(projection, Linear) else 0
            if width and len(module.weight) == width * member.size:  # type: ignore[arg-type]
                sums.cut_norm(module, width)
    return sums


def _makes_all_heads(name: str, style: str) -> bool:
    """Return whether a module makes the queries, keys and values of all members, by the plan of `split_by_heads`."""
    return style == WHOLE and name.endswith(".qkv_proj")


def _keep_local(module: Module) -> None:
    """Make slices of weights plain tensors: hooks of transformers look the local slice up in each call."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if isinstance(weight, DTensor):
            setattr(module, name, Parameter(weight.to_local(), requires_grad=False))
