"""Lists the sections of the GPU check, the most important first. No torch: each section runs in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from oaiserve.runtime import THREADS, Runtime

if TYPE_CHECKING:
    import torch

    from tools.gpu.turns import Turns

NOT_ON_CPU = "not measured on a CPU"
Call = Literal["figures", "answers"]


class Target(NamedTuple):
    """Where a section runs, and how much of it."""

    device: torch.device
    quick: bool  # tiny models and short runs, which show that it works, not how fast
    turns: Turns | None = None  # None: no other section uses the device
    runtime: Runtime = THREADS

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_dry(self) -> bool:
        """Return whether the device is a fake one: models start as on a GPU, and nothing is computed."""
        return self.device.type == "meta"

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which no other section measures or starts a model. A section that measures takes it."""
        return nullcontext() if self.turns is None else self.turns.measuring()

    def starting(self) -> AbstractContextManager[None]:
        """Return a context in which no other section measures. A section that only starts a model takes it."""
        return nullcontext() if self.turns is None else self.turns.starting()


@dataclass(frozen=True, slots=True)
class Section:
    """A function of a module here, `run(target, **arguments)`, yields dictionaries, which together are the result."""

    name: str
    run: str  # module:function
    limit_seconds: float = 240
    arguments: Mapping[str, str] = field(default_factory=dict)
    call: Call = "figures"
    is_check: bool = False  # it checks answers, and measures no time
    needs_gpu: bool = False


# Each call takes at most 270 seconds. Its sections begin side by side, and measure in this order: first what was never
# measured, then what was. No figure counts before answers are right.
ANSWERS = (
    Section("probes", "probes:run", call="answers", is_check=True),
    Section("schedule", "schedule:run", call="answers", is_check=True),
    Section("families", "answers:families", 600, call="answers", is_check=True),  # a dry run takes long
    Section("graphs", "answers:shapes", call="answers", is_check=True),
    Section("memory", "probes:memory", call="answers", is_check=True, needs_gpu=True),
)
FIGURES = (
    Section("environment", "environment:run", 90),
    Section("quantized", "quantized:run"),
    Section("streams", "streams:run"),
    Section("few-tokens", "kernel_times:few_tokens", 60, needs_gpu=True),
    Section("latent", "kernel_times:latent", 60, needs_gpu=True),
    Section("penalties", "kernel_times:penalties", 60, needs_gpu=True),
    Section("8b", "steps:run", arguments={"model": "llama-3.1-8b"}),
    Section("1b", "steps:run", arguments={"model": "llama-3.2-1b"}),
    Section("gpt2", "gpt2:run"),
    Section("offload", "offload:run", 90),
)
SECTIONS = ANSWERS + FIGURES
CHECKS = tuple(section.name for section in SECTIONS if section.is_check)
