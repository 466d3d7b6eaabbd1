"""The check of a native step: its logits must be those of transformers' code, in a prompt and in two decodes.

Where transformers' code cannot compute all layers, a few stand for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.description import Decoder, Layer, NotKnown
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import INT8_CACHE_TOLERANCE, compare, tolerance

NUM_TOKENS = 9
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def batches(spec: ModelSpec, block_size: int, adapter: Adapter | None = None) -> list[Batch]:
    """Return batches with a prompt, with the token after it, and with the same token at the model's last position.

    At the last position rotary tables end, and values that grow with the position are large. With an `adapter`, all
    tokens have it.
    """
    steps = (
        prompt(NUM_TOKENS - 1, spec.vocab_size, block_size),
        prompt(NUM_TOKENS, spec.vocab_size, block_size, start=NUM_TOKENS - 1),
    )
    found = [build_batch(step, block_size, spec.device) for step in steps]
    if spec.state_shapes:
        states = States(spec.state_shapes, 1, spec.device)
        for batch, start in zip(found, (0, NUM_TOKENS - 1), strict=True):
            batch.states = states.of_step([StateChunk(0, start, len(batch.input_ids))])
    found.append(replace(found[-1], positions=torch.tensor([spec.max_model_len - 1], device=spec.device)))
    return found if adapter is None else [replace(batch, adapters=[adapter]) for batch in found]


def may_round_more(decoder: Decoder, dtype: torch.dtype, *, is_quantized: bool) -> bool:
    """Decide whether logits may differ by more than the rounding of `dtype` explains.

    Where weights are quantized they do. And where numbers are rounded to 16 bits, a router chooses another expert for a
    token that likes two nearly as much.
    """
    return is_quantized or (dtype != torch.float32 and decoder.has_experts)


@torch.inference_mode()
def refuse_unless_equal(
    native: NativeDecoder,
    spec: ModelSpec,
    expected: list[Tensor],
    *,
    block_size: int,
    is_quantized: bool,
    probe: Adapter | None = None,
) -> None:
    """Raise NotKnown unless the native step computes `expected`: transformers' logits of the batches, first without an
    adapter, and then with the `probe`, if there is one."""
    limit = tolerance(spec.dtype, is_quantized=is_quantized)
    if any(shape.is_int8 for shape in spec.kv_shapes.values()):
        limit = max(limit, INT8_CACHE_TOLERANCE)
    asked = batches(spec, block_size) + ([] if probe is None else batches(spec, block_size, probe))
    named = (("logits", pair) for pair in zip(asked, expected, strict=True))
    found = compare(lambda pair: native.forward(pair[0]), lambda pair: pair[1], named, limit)
    if found is not None:
        raise NotKnown(f"its outputs differ by {found.apart:.1%} from those of transformers' code")


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
