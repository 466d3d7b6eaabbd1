"""The check of a native step: its logits must be those of transformers' code, in a prompt and in two decodes.

A part of the layers is compared: one of each kind (small_model.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Decoder, Layer, NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import Adapter, probe_adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.reserved import ReservedMemory
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import compare

NUM_TOKENS = 9
_LAYER = re.compile(r"(?<=\.)(layers|h)\.(\d+)(?=\.)")


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


@torch.inference_mode()
def refuse_unless_equal(
    executor: Executor,
    spec: ModelSpec,
    expected: list[Tensor],
    limit: float,
    *,
    block_size: int,
    probe: Adapter | None = None,
) -> None:
    """Raise NotKnown unless the executor computes `expected`: transformers' logits of the batches, first without an
    adapter, and then with the `probe`, if there is one."""
    computed = batches(spec, block_size) + ([] if probe is None else batches(spec, block_size, probe))
    named = (("logits", pair) for pair in zip(computed, expected, strict=True))
    found = compare(lambda pair: executor.forward(pair[0]), lambda pair: pair[1], named, limit)
    if found is not None:
        raise NotKnown(f"its outputs differ by {found.apart:.1%} from those of transformers' code")


@torch.inference_mode()
def refuse_unless_finite(executor: Executor, spec: ModelSpec, block_size: int) -> None:
    """Raise NotKnown if the logits of the whole model are no numbers: a part has been compared."""
    for batch in batches(spec, block_size):
        if not executor.forward(batch).isfinite().all():
            raise NotKnown("its outputs are no finite numbers")


def refuse_unless_as_checked(
    library: Library,
    decoder: Decoder,
    spec: ModelSpec,
    checked: Checked,
    options: EngineOptions,
    *,
    num_threads: int,
    reserved: ReservedMemory | None = None,
) -> None:
    """Raise NotKnown unless the native step of a part of the decoder computes what transformers' code did.

    Its weights are packed in `reserved`, where those of the whole decoder will be.
    """
    small = checked.part.decoder(decoder)
    native = NativeDecoder(
        library,
        small,
        num_blocks=1,
        block_size=options.block_size,
        num_threads=num_threads,
        has_adapters=options.has_adapters,
        reserved=reserved,
        is_passing=True,
    )
    probe = probe_adapter(small.adaptable(), spec.dtype) if options.has_adapters else None
    of_part = checked.part.spec(spec)
    refuse_unless_equal(native, of_part, checked.expected, checked.limit, block_size=options.block_size, probe=probe)


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
        return _LAYER.sub(lambda found: f"{found[1]}.{self.layers[int(found[2])]}", name)

    def spec(self, whole: ModelSpec) -> ModelSpec:
        places = list(enumerate(self.layers))
        return replace(
            whole,
            vocab_size=self.rows,
            kv_shapes={place: whole.kv_shapes[layer] for place, layer in places if layer in whole.kv_shapes},
            state_shapes={place: whole.state_shapes[layer] for place, layer in places if layer in whole.state_shapes},
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """What a start has compared with transformers' code, and what later ones compare again."""

    part: Part
    expected: list[Tensor]  # float32, transformers' logits of the batches, without an adapter and then with one
    limit: float  # by which the native step's logits may differ
