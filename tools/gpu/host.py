"""Counts what a step on a GPU launches, and measures its host time, without a GPU: on a double that runs no kernel.

    python -m tools.gpu.host

Models have the layers of real ones, and are narrow: then torch needs as long for an operation as it does for a launch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import KernelInterface

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu import fast_paths
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.started import Started
from oaiserve.engine.start.ways import gpu
from oaiserve.engine.step import Step
from tests.engine.model.operations import NO_LAUNCH, Operations
from tests.models.decoders import random_model, real_shape
from tests.models.small_configs import config_of
from tools.engine_load import random_step
from tools.gpu.workload import BLOCK_SIZE, blocks_for
from tools.markdown import as_markdown

NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
NARROW |= {"head_dim": 16, "vocab_size": 256, "max_position_embeddings": 8192}
WARM_UP, MEASURED, CONTEXT, PROMPT, ADAPTERS = 70, 30, 300, 130, 8  # steps, and tokens


class Believing(Trials):
    """Trials that find no difference: a double computes nothing."""

    def is_usable(self, feature: Any, problem: Callable[[], object | None]) -> bool:
        problem()
        self.off[feature] = ""
        return True


class Double:
    """Stands for a GPU: it counts launches of kernels and of graphs, and runs no kernel."""

    def __init__(self) -> None:
        self.num_launches = self.num_captured = 0

    def launch(self, *_: Any, **__: Any) -> None:
        self.num_launches += 1

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture work."""
        run()
        self.num_captured += 1
        return self.launch

    @contextmanager
    def in_place(self) -> Iterator[None]:
        doubles: list[tuple[Any, str, Any]] = [
            (KernelInterface, "__getitem__", lambda kernel, grid: self.launch),
            (LoadedModel, "is_on_cpu", False),
            (fast_paths, "select_backend", lambda device, name: TritonAttention),
            (gpu, "gpu_sizes", lambda loaded, options, _: (options.kv_blocks, 256 * bool(loaded.state_shapes))),
            (gpu, "CudaCapture", lambda device: self),
            (torch, "empty", torch.zeros),  # what no kernel writes must still be the id of a token
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30)),
        ]
        with ExitStack() as stack:
            for where, name, double in doubles:
                stack.enter_context(patch.object(where, name, double))
            yield


def cases() -> Iterator[tuple[str, LoadedModel, Step, int]]:
    """Yield the name of each case, its model, its step, and the number of adapters."""
    config = real_shape("llama-3.1-8b")
    for key, value in NARROW.items():
        setattr(config, key, value)
    dense = prepare(random_model(config))
    hybrid = prepare(random_model(config_of("falcon_h1", num_hidden_layers=36, max_position_embeddings=8192)))
    for name, loaded, decodes, prompts, adapters in (
        ("8B, 256 decodes of 300 tokens", dense, 256, 0, 0),
        ("8B, 64 decodes beside a prompt of 130", dense, 64, 1, 0),
        ("8B, 64 decodes with 8 adapters", dense, 64, 0, ADAPTERS),
        ("the same, beside a prompt of 130", dense, 64, 1, ADAPTERS),
        ("Falcon H1 of 36 layers, 64 decodes", hybrid, 64, 0, 0),
    ):
        step = random_step([(CONTEXT, 1)] * decodes + [(0, PROMPT)] * prompts, BLOCK_SIZE, loaded.vocab_size)
        for place, chunk in enumerate(step.chunks):
            chunk.sequence.state = place if loaded.state_shapes else None
            chunk.sequence.adapter = place % adapters + 1 if adapters else 0
        yield name, loaded, step, adapters


def started(loaded: LoadedModel, step: Step, adapters: int) -> Started:
    blocks = blocks_for(len(step.chunks), CONTEXT + 1)
    options = EngineOptions(kv_blocks=blocks, max_running=256, lora_dir=Path("unread") if adapters else None)
    made = gpu.start_on_gpu(loaded, options, Believing())
    for number in range(1, adapters + 1):
        made.runner.add_adapter(number, probe_adapter(made.adaptable, loaded.dtype))
    return made


def measure(runner: ModelRunner, step: Step, double: Double) -> tuple[int, float]:
    """Return the launches of a step, and the host's microseconds to launch it: the least, as others use the machine."""
    took = []
    for _ in range(WARM_UP + MEASURED):
        began = time.perf_counter()
        launched = runner.launch(step)
        took.append((time.perf_counter() - began) * 1e6)
        runner.collect(launched)
    before = double.num_launches
    with Operations() as operations:
        runner.launch(step)
    of_torch = sum(name not in NO_LAUNCH for name in operations.names)
    return double.num_launches - before + of_torch, min(took[WARM_UP:])


def main() -> None:
    rows = [["a step", "launches", "host time (µs)", "captures of the start"]]
    for name, loaded, step, adapters in cases():
        double = Double()
        with double.in_place(), torch.inference_mode():
            runner = started(loaded, step, adapters).runner
            captured = double.num_captured
            launches, took = measure(runner, step, double)
        rows.append([name, f"{launches:,}", f"{took:,.0f}", str(captured)])
        print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    print("\n".join(as_markdown(rows)))


if __name__ == "__main__":
    main()
