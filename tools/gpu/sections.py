"""Lists the sections of the GPU check, the most important first. No torch: each section runs in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

NOT_ON_CPU = "not measured on a CPU"


class Target(NamedTuple):
    """Where a section runs, and how much of it."""

    device: torch.device
    quick: bool  # tiny models and short runs, which show that it works, not how fast

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Section:
    """A function of a module here, `run(target, **arguments)`, yields dictionaries, which together are the result."""

    name: str
    run: str  # module:function
    limit_seconds: float = 170
    arguments: Mapping[str, str] = field(default_factory=dict)
    is_check: bool = False  # checks answers: measures no time, so it may run next to other checks
    is_alone: bool = False  # it needs the device's memory for itself
    needs_gpu: bool = False


SECTIONS = (
    # Before all else, so that nothing is explained by a kernel that reads or writes elsewhere.
    Section("memory", "probes:memory", 120, is_check=True, is_alone=True, needs_gpu=True),
    Section("environment", "environment:run", 120),
    # Whether answers are right, the widest question first.
    Section("families", "answers:families", is_check=True),
    Section("probes", "probes:run", is_check=True, needs_gpu=True),
    Section("graphs", "answers:shapes", is_check=True, needs_gpu=True),
    # Speed, the most telling figures first: the steps of a small and of a large model, then ragged ones.
    Section("decode-1b", "steps:run", 110, {"model": "llama-3.2-1b"}),
    Section("decode-8b", "steps:run", 150, {"model": "llama-3.1-8b"}),
    Section("uneven", "engines:uneven", 70),
    Section("gpt2", "engines:gpt2", 70),
    Section("streams", "streams:run", 170),
    Section("peers", "peers:run", 170, needs_gpu=True),
)
CHECKS = tuple(section.name for section in SECTIONS if section.is_check)
