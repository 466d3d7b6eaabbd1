"""Tries what torch may compute faster than a kernel of ours, states in chunks of tokens: whether it is right on this
device, and faster. A probe does so in its process, because the device may fail in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from oaiserve.checkpoints.load_errors import named
from oaiserve.engine.decoder.description import DeltaNet, Layer, Mamba2
from oaiserve.engine.executors.cuda.chunked_states import chunked
from oaiserve.engine.executors.reference.mixers import recurrence
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, Difference, difference

Seconds = Callable[[Callable[[], object]], float]

RUNS = 5  # The fastest one counts.
ROWS = 2048


def seconds_on_device(run: Callable[[], object]) -> float:
    """Return the seconds that the device takes for a run that has been compiled."""
    run()
    best = float("inf")
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


@torch.inference_mode()
def state_chunks(layers: Iterable[Layer], device: torch.device, seconds: Seconds = seconds_on_device) -> str:
    """Return why prompts of layers with a state shall not be computed in chunks, or an empty text. One of each shape is
    tried."""
    from oaiserve.engine.executors.cuda import triton_states

    shapes = {shape_of(layer.mixer) for layer in layers if isinstance(layer.mixer, DeltaNet | Mamba2)}
    if not shapes:
        return "no layer of the model has a state that prompts walk through"
    in_chunks = 0.0
    walking = 0.0
    for heads, key_heads, key_dim, value_dim, has_rate in shapes:
        tokens = (1, ROWS)
        of_heads, rates = torch.rand(2, *tokens, heads, device=device)
        key, query = torch.randn(2, *tokens, key_heads, key_dim, device=device) * key_dim**-0.5
        value = torch.randn(*tokens, heads, value_dim, device=device)
        inputs = (1 - of_heads / 16, key, value, query, rates if has_rate else None)
        states = torch.randn(1, heads, key_dim, value_dim, device=device).repeat(2, 1, 1, 1).split(1)
        outputs = [recur(state, *inputs) for recur, state in zip((chunked, recurrence), states, strict=True)]
        for what, both in (("outputs", outputs), ("states", states)):
            problem = Difference(what, difference(*both), FLOAT32_TOLERANCE)
            if problem.is_beyond_rounding:
                return f"{problem}"
        in_chunks += seconds(partial(chunked, states[0], *inputs))
        walking += seconds(partial(triton_states.recurrence, states[1], *inputs))
    return unless_slower(in_chunks, walking)


def shape_of(mixer: DeltaNet | Mamba2) -> tuple[int, int, int, int, bool]:
    """Return heads, key heads, the dimensions of keys and values, and whether tokens have rates."""
    if isinstance(mixer, DeltaNet):
        return mixer.value_heads, mixer.key_heads, mixer.key_dim, mixer.value_dim, True
    return mixer.heads, mixer.groups, mixer.state_dim, mixer.head_dim, False


def unless_slower(by_torch: float, by_kernels: float) -> str:
    if by_torch < by_kernels:
        return ""
    return f"torch takes {by_torch * 1e6:.0f} µs for what takes kernels {by_kernels * 1e6:.0f} µs"


def reason(trial: Callable[[], str]) -> str:
    """Run a trial. Its error is a reason, too: a library may raise anything for a device that it can't use."""
    try:
        return trial()
    except Exception as error:
        return named(error)
