"""Lists the sections of the GPU check, the most important first. No torch: each section runs in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

NOT_ON_CPU = "not measured on a CPU"
NO_TRITON = "Triton is not installed: there are no kernels of ours."


class Target(NamedTuple):
    """Where a section runs, and how much of it."""

    device: torch.device
    quick: bool  # tiny models and short runs, which show that it works, not how fast

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Section:
    """A function `run(target, **arguments)` of a module yields dictionaries, which together are the result."""

    name: str
    module: str
    run: str
    limit_seconds: float
    arguments: Mapping[str, str] = field(default_factory=dict)
    is_check: bool = False  # of answers: it measures no time, so it may run beside other checks
    needs_gpu: bool = False
    needs_triton: bool = False


def _check(name: str, module: str, run: str, *, needs_gpu: bool = False, needs_triton: bool = False) -> Section:
    module = f"tools.gpu.{module}"
    return Section(name, module, run, 170, is_check=True, needs_gpu=needs_gpu, needs_triton=needs_triton)


SECTIONS = (
    Section("environment", "tools.gpu.environment", "run", 120),
    # Whether answers are right, the widest question first.
    _check("families", "answers", "families"),
    _check("kernels", "kernels", "run", needs_triton=True),
    _check("layers", "packed", "layers", needs_triton=True),
    _check("experts", "packed", "experts", needs_triton=True),
    _check("graphs", "answers", "shapes", needs_gpu=True),
    _check("compiled", "answers", "compiled", needs_gpu=True),
    _check("overload", "overload", "run"),
    _check("waits", "waits", "run", needs_gpu=True),
    # How fast they are, with what says most first: the steps of a small and of a large model, then ragged ones.
    Section("decode-1b", "tools.gpu.steps", "run", 110, {"model": "llama-3.2-1b"}),
    Section("uneven", "tools.gpu.engines", "uneven", 70),
    Section("gpt2", "tools.gpu.engines", "gpt2", 70),
    Section("decode-8b", "tools.gpu.steps", "run", 150, {"model": "llama-3.1-8b"}),
    Section("streams", "tools.gpu.streams", "run", 90),
    Section("split", "tools.gpu.split", "run", 150),  # where there are two GPUs
)
CHECKS = tuple(section.name for section in SECTIONS if section.is_check)
