"""The members of a model that is split add up and put together in a forward what they need, by sums of ours.

These take the place of transformers' hooks.

A matrix is cut along its rows, so that a product of it needs nothing, or along its columns, so that products are added
up. The embedding is cut along its rows, and what a member does not have it adds as zeros. The logits are put together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Linear, Module, Parameter
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.engine.model.checkpoints.integer_layouts import Floats, Integers, part_of
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.split import Member

# The name that torch has had since 2.13, or the one before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
ROWS, COLUMNS = 0, 1
# What transformers' plan says of a module, and along which dimension its weights are cut.
_CUTS = {
    "colwise": ROWS,
    "rowwise": COLUMNS,
    "embedding_rowwise": ROWS,
    "colwise_gather_output": ROWS,
    "replicated_with_grad_allreduce": None,
}


class ElsewhereError(Exception):
    """Another part of the model has a problem with what all members have tried."""

    def __init__(self) -> None:
        super().__init__("another part of the model has a problem with it")


class OneShot(Protocol):
    """Another way to add up, as `one_shot` has it."""

    def fits(self, x: Tensor) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Sums:
    """The sums of one member. While they are `left_out`, a forward computes what this member can compute alone."""

    def __init__(self, member: Member) -> None:
        self.rank, self.size = member.rank, member.size
        self._are_left_out = False
        self._cuts: dict[str, int] = {}  # by the name of the module
        self.one_shot: OneShot | None = None  # which adds up small messages

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of the members' tensors, which may be in place of this one."""
        if self._are_left_out:
            return x
        if self.one_shot is not None and self.one_shot.fits(x):
            return self.one_shot(x)
        return self.by_library(x)

    def by_library(self, x: Tensor) -> Tensor:
        """Return the sum as NCCL or gloo makes it, in place of this member's tensor."""
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

    def part_of(self, matrix: Integers | Floats, name: str) -> Integers | Floats | None:
        """Return this member's part of the matrix of a module, or None if its groups are not cut evenly."""
        return part_of(matrix, self._cuts[name], self.rank, self.size)

    def take_over(self, name: str, module: Any, style: str) -> None:
        """Let a module that transformers' plan names compute with its own weights, as plain tensors, and these sums."""
        del module.forward  # transformers' hook
        cut = _CUTS[style]
        if cut is None:
            return
        self._cuts[name] = cut
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


def can_be_taken_over(config: PreTrainedConfig) -> bool:
    """Return whether the plan for a model has only sums behind the layers' matrices that are cut along columns."""
    return set((config.base_model_tp_plan or {}).values()) <= _CUTS.keys() - {"colwise_gather_output"}


def take_over(model: PreTrainedModel, member: Member) -> Sums | None:
    """Put our sums in the place of transformers' hooks, or return None for a plan with others. Those stay."""
    hooked: dict[str, Module] = {name: module for name, module in model.named_modules() if "forward" in vars(module)}
    styles = {name: model.tp_plan.get(re.sub(r"\d+", "*", name), "") for name in hooked}
    if not can_be_taken_over(model.config) or not set(styles.values()) <= _CUTS.keys():
        for module in model.modules():
            if isinstance(module, Linear):
                _keep_local(module)
        return None
    sums = Sums(member)
    for name, module in hooked.items():
        sums.take_over(name, module, styles[name])
    return sums


def _keep_local(module: Module) -> None:
    """Make this member's part of a module's weights plain tensors.

    transformers' hooks accept distributed tensors too, but look up their local part in each call.
    """
    for name, weight in list(module.named_parameters(recurse=False)):
        if isinstance(weight, DTensor):
            setattr(module, name, Parameter(weight.to_local(), requires_grad=False))
