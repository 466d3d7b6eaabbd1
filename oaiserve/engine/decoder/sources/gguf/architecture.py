"""`Architecture` describes how GGUF files of one architecture differ from files on the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, no_fields
from oaiserve.engine.decoder.sources.names import Names

Order = NDArray[np.int64]
MakeOrder = Callable[[Settings], Order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture of GGUF files. The keys of all mappings are roles, such as `q`."""

    name: str  # the name in GGUF files
    type: str  # transformers' name of the family, unless the fields name another one
    fields: Callable[[Metadata], Fields] = no_fields  # fields of config.json beyond the common ones
    names: Names = field(default_factory=dict)  # unusual names of tensors
    # The tensors of a role that is one matrix elsewhere, maybe by several choices. Their rows follow each other. Those
    # in several formats are no matrix of one role.
    joined: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    # Makes a tensor of those in `joined`, which are float32, where no order of rows does.
    make: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = field(default_factory=dict)
    rows: Mapping[str, MakeOrder] = field(default_factory=dict)  # the rows of the file in their order on the hub
    columns: Mapping[str, MakeOrder] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # tensors that are not used


def neighbours_as_halves(heads: int, head_dim: int) -> Order:
    """Return the rows of heads for files in which pairs that are rotated together are neighbours."""
    return np.arange(heads * head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


# llama.cpp rotates neighbours in these architectures, whose rows the conversion reorders for that.
TURNED: Mapping[str, MakeOrder] = {
    "q": lambda settings: neighbours_as_halves(settings["num_attention_heads"], settings["head_dim"]),
    "k": lambda settings: neighbours_as_halves(settings["num_key_value_heads"], settings["head_dim"]),
}
# These architectures' files name the norm before the MLP as Llama's modules do.
NORM_BEFORE_MLP: Names = {"mlp_norm": "post_attention_norm", "attention_out_norm": ()}
