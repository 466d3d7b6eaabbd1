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


def attend(module: Module, handed: Handed, query: Tensor, key: Tensor, value: Tensor, **scoring: Any) -> Tensor:
    """Return the result [1, T, heads, dim] for query, key and value [1, heads, T, dim]."""
    from oaiserve.engine.model.attention.hook import paged_attention  # imports transformers

    return paged_attention(module, query, key, value, None, call=handed.call, **scoring)[0]


def slopes_of(alibi: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the slopes [heads] of the biases [heads, 1, 2] of two neighbouring keys."""
    biases = alibi.flatten(1).float()
    return (biases[:, 1] - biases[:, 0]).to(model.device)


def no_biases(*_: Any, **__: Any) -> None:
    """Compute no biases in place of a model's own function: its attention no longer reads them."""
