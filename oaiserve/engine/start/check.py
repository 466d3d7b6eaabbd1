"""The check of a native step: its logits must be those of transformers' code, in a prompt and in two decodes."""

from __future__ import annotations

from dataclasses import replace

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.description import Decoder, NotKnown
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import INT8_CACHE_TOLERANCE, compare, tolerance

NUM_TOKENS = 9
# Logits that have nothing to do with each other differ by 1.4 in the mean, and zeros by 1 from any others.
UNRELATED = 1.0


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


class Differs(NotKnown):
    """The native step computes something else than transformers' code. `difference` says how far both are apart."""

    def __init__(self, found: float) -> None:
        super().__init__(f"its outputs differ by {found:.1%} from those of transformers' code")
        self.difference = found


@torch.inference_mode()
def refuse_unless_equal(
    native: NativeDecoder,
    spec: ModelSpec,
    expected: list[torch.Tensor],
    *,
    block_size: int,
    is_quantized: bool,
    probe: Adapter | None = None,
) -> None:
    """Raise Differs unless the native step computes `expected`: transformers' logits of the batches, first without an
    adapter, and then with the `probe`, if there is one."""
    limit = tolerance(spec.dtype, is_quantized=is_quantized)
    if any(shape.is_int8 for shape in spec.kv_shapes.values()):
        limit = max(limit, INT8_CACHE_TOLERANCE)
    pairs = zip(_all_batches(spec, block_size, probe), expected, strict=True)
    named = (("logits", pair) for pair in pairs)
    found = compare(lambda pair: native.forward(pair[0]), lambda pair: pair[1], named, limit)
    if found is not None:
        raise Differs(found.apart)


@torch.inference_mode()
def own_logits(native: NativeDecoder, spec: ModelSpec, block_size: int, probe: Adapter | None) -> list[torch.Tensor]:
    """Compute the native step's logits of the batches of the check, which later starts find again to the last bit."""
    return [native.forward(batch).clone() for batch in _all_batches(spec, block_size, probe)]


def _all_batches(spec: ModelSpec, block_size: int, probe: Adapter | None) -> list[Batch]:
    with_probe = [] if probe is None else batches(spec, block_size, probe)
    return batches(spec, block_size) + with_probe
