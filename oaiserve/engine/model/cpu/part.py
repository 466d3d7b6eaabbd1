"""A few layers of a decoder, which stand for all in the check where transformers' code cannot compute them all."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from oaiserve.engine.model.cpu.description import Decoder
from oaiserve.engine.model.spec import ModelSpec

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a decoder, between the first rows of its embedding and of its head."""

    layers: list[int]
    rows: int

    def decoder(self, whole: Decoder) -> Decoder:
        """Return the part of a description. Its layers are the same objects."""
        head = whole.head
        return replace(
            whole,
            embedding=whole.embedding[: self.rows],
            layers=[whole.layers[layer] for layer in self.layers],
            head=replace(
                head, weight=head.weight[: self.rows], bias=None if head.bias is None else head.bias[: self.rows]
            ),
        )

    def name_in_whole(self, name: str) -> str:
        """Return the name that a module or a parameter of the part has in the whole model."""
        return _LAYER.sub(lambda found: f".{self.layers[int(found[1])]}.", name)

    def spec(self, whole: ModelSpec) -> ModelSpec:
        places = list(enumerate(self.layers))
        return replace(
            whole,
            vocab_size=self.rows,
            kv_shapes={place: whole.kv_shapes[layer] for place, layer in places if layer in whole.kv_shapes},
            state_shapes={place: whole.state_shapes[layer] for place, layer in places if layer in whole.state_shapes},
        )
