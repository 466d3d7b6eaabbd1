"""The changes that llama.cpp's conversion makes to parameters of several families, and their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

Order = NDArray[np.int64]
# The way back for each number.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "one added": lambda numbers: numbers - 1,
    "minus exp": lambda numbers: (-numbers).log(),
}


class Change(NamedTuple):
    """A change of the parameters whose names have a pattern. The first pattern that a name has counts."""

    pattern: str
    # Which rows of the file, those of its tensors one behind the other, are the rows of the parameter.
    rows: Callable[[PreTrainedConfig, str], Order] | None = None
    columns: Callable[[PreTrainedConfig], Order] | None = None  # which columns of the file are those of the parameter
    values: str | None = None  # one of VALUES
    # Makes a parameter that no order of rows makes of the tensors of the file, in float32.
    joined: Callable[[PreTrainedConfig, str, Sequence[Tensor]], Tensor] | None = None


def _halves(config: PreTrainedConfig, name: str) -> Order:
    """Return the rows of heads whose file has the pairs that are rotated together as neighbours, and not as halves."""
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return np.arange(heads * head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


TURNED = Change(r"\.[qk]_proj\.", rows=_halves)
NORMS_ADD_ONE = Change(r"norm\w*\.weight$", values="one added")
RATES = Change(r"A_log$", values="minus exp")
