"""The parts with which families bring paged attention to code that computes attention by itself, or drops arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oaiserve.engine.model.attention.hook import AttentionCall


class Handed:
    """The arguments of the forward that runs, for modules that do not get them."""

    call: AttentionCall
    positions: Tensor  # int64 [T], of its tokens in their sequences

    def take_from(self, model: PreTrainedModel) -> None:
        """Hold the call of each forward of the model from now on."""

        def take(_: Module, __: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
            self.call = arguments["call"]
            (self.positions,) = arguments["position_ids"]

        model.register_forward_pre_hook(take, with_kwargs=True)


def hand_over(module: Module, _: PreTrainedModel, handed: Handed) -> bool:
    """Hand over the call to attention whose layers get all arguments, but drop those that are not named."""
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "call": handed.call}), with_kwargs=True)
    return True
