"""A few layers of a decoder, which stand for all in the check where transformers' code cannot compute them all."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.description import Decoder, Layer
from oaiserve.engine.model.spec import ModelSpec

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a decoder, between the first rows of its embedding and of its head."""

    layers: list[int]
    rows: int

    def decoder(self, whole: Decoder) -> Decoder:
        """Return the part of a description. Its layers are the same objects, but for those with the cache of others."""
        head, inputs, number = whole.head, whole.layer_inputs, len(whole.layers)
        if inputs is not None:
            inputs = replace(
                inputs,
                table=self.of_layers(inputs.table[: self.rows], number, dim=1),
                projection=replace(inputs.projection, weight=self.of_layers(inputs.projection.weight, number, dim=0)),
            )
        return replace(
            whole,
            embedding=whole.embedding[: self.rows],
            layer_inputs=inputs,
            layers=[self._in_part(whole.layers[layer]) for layer in self.layers],
            head=replace(
                head, weight=head.weight[: self.rows], bias=None if head.bias is None else head.bias[: self.rows]
            ),
        )

    def _in_part(self, layer: Layer) -> Layer:
        attention = layer.attention
        if attention is None or attention.cache_of is None:
            return layer
        return replace(layer, attention=replace(attention, cache_of=self.layers.index(attention.cache_of)))

    def of_layers(self, matrix: Tensor | Blocks, num_layers: int, *, dim: int) -> Tensor | Blocks:
        """Return the rows (`dim` 0) or the columns of these layers, of a matrix that has some for each of `num_layers`,
        side by side. Raises ValueError where the columns of a layer are not whole blocks."""
        each = matrix.shape[dim] // num_layers
        numbers = (np.array(self.layers)[:, None] * each + np.arange(each)).flatten()
        if isinstance(matrix, Blocks):
            return matrix.of_columns(numbers) if dim else matrix[numbers]
        return matrix.index_select(dim, torch.from_numpy(numbers))

    def name_in_whole(self, name: str) -> str:
        """Return the name that a module or a parameter of the part has in the whole model."""
        return _LAYER.sub(lambda found: str(self.layers[int(found[0])]), name)

    def spec(self, whole: ModelSpec) -> ModelSpec:
        places = list(enumerate(self.layers))
        return replace(
            whole,
            vocab_size=self.rows,
            kv_shapes={place: whole.kv_shapes[layer] for place, layer in places if layer in whole.kv_shapes},
            state_shapes={place: whole.state_shapes[layer] for place, layer in places if layer in whole.state_shapes},
        )
