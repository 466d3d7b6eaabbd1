"""Says on which device a section of the GPU check runs, and how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

NOT_ON_CPU = "not measured on a CPU"


class Target(NamedTuple):
    device: torch.device
    quick: bool  # tiny models and short runs, which show that it works, not how fast

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"
