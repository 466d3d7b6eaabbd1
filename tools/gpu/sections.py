"""Lists the sections of the GPU check, the most important first. No torch: each section runs in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Section:
    """`run(target, **arguments)` of the module yields dictionaries, which together are the section's result."""

    name: str
    module: str
    limit_seconds: float
    arguments: Mapping[str, str] = field(default_factory=dict)
    side_by_side: bool = False  # it measures no time, so it may run beside others that measure none


SECTIONS = (
    Section("environment", "tools.gpu.environment", 120),
    # Whether answers are right, the widest question first. These measure no time.
    Section("families", "tools.gpu.answers", 170, {"part": "families"}, side_by_side=True),
    Section("kernels", "tools.gpu.kernels", 170, side_by_side=True),
    Section("layers", "tools.gpu.layer_check", 170, side_by_side=True),
    Section("experts", "tools.gpu.expert_check", 170, side_by_side=True),
    Section("graphs", "tools.gpu.answers", 170, {"part": "shapes"}, side_by_side=True),
    Section("compiled", "tools.gpu.answers", 170, {"part": "compiled"}, side_by_side=True),
    Section("overload", "tools.gpu.overload", 170, side_by_side=True),
    Section("waits", "tools.gpu.waits", 170, side_by_side=True),
    # How fast they are, with what says most first: the steps of a small and of a large model, then ragged ones.
    Section("decode-1b", "tools.gpu.steps", 110, {"model": "llama-3.2-1b"}),
    Section("uneven", "tools.gpu.uneven", 70),
    Section("gpt2", "tools.gpu.teaching", 70),
    Section("decode-8b", "tools.gpu.steps", 150, {"model": "llama-3.1-8b"}),
    Section("streams", "tools.gpu.streams", 90),
    Section("split", "tools.gpu.split_check", 150),  # where there are two GPUs
)
