"""The operations of layers for which a GPU has kernels, and the same in plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from oaiserve.engine.executors.reference.mixers import Recurrence, recurrence
from oaiserve.engine.model import layer_operations


class Kernels(NamedTuple):
    operations: ModuleType  # `layer_operations` or `triton_layers`
    experts: ModuleType | None  # `triton_experts`; None: in plain torch, for which the host waits for the device
    recurrence: Recurrence


PLAIN = Kernels(layer_operations, None, recurrence)


def triton_kernels() -> Kernels:
    """Return the kernels in Triton. Raises ImportError without the package."""
    from oaiserve.engine.model.gpu import triton_experts, triton_layers, triton_states

    return Kernels(triton_layers, triton_experts, triton_states.recurrence)
