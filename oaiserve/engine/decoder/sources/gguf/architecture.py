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
    type: str  # transformers' name of the family; the fields may replace it
    fields: Callable[[Metadata], Fields] = no_fields  # fields of config.json beyond the common ones
    names: Names = field(default_factory=dict)  # names of tensors that differ from the usual ones
    # For a role that is one matrix in other files: the tensors whose rows make it up. There may be alternatives.
    # Tensors in several formats can't be joined.
    joined: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    # For roles in `joined`: computes the tensor from float32 tensors, where joining and reordering their rows isn't
    # enough.
    make: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = field(default_factory=dict)
    rows: Mapping[str, MakeOrder] = field(default_factory=dict)  # turns the file's order of rows into the hub's
    columns: Mapping[str, MakeOrder] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # tensors that are not used


def neighbours_as_halves(heads: int, head_dim: int) -> Order:
    """Return the order of the rows of heads, for files in which the numbers of a rotated pair are neighbours."""
    return np.arange(heads * head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


# llama.cpp rotates neighbours in these architectures, so the conversion has reordered their rows.
TURNED: Mapping[str, MakeOrder] = {
    "q": lambda settings: neighbours_as_halves(settings["num_attention_heads"], settings["head_dim"]),
    "k": lambda settings: neighbours_as_halves(settings["num_key_value_heads"], settings["head_dim"]),
}
# These architectures' files name the norm before the MLP as Llama's modules do.
NORM_BEFORE_MLP: Names = {"mlp_norm": "post_attention_norm", "attention_out_norm": ()}
