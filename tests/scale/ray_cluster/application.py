"""The application of this package: replicas as in oaiserve.scale, whose engines have a device double for a model.

Each step of a double takes a set time, and each row draws the same token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.step import ChunkResult, Masks, Step, StepResult
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.times import monotonic_ns
from oaiserve.scale.on_ray.application import build
from tests.models.decoders import byte_tokenizer

MAX_MODEL_LEN = 4096
MOST_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class Launched:
    step: Step
    ends_ns: int


class DeviceDouble:
    """A runner whose device takes `step_ns` for each step, one after the other, beside the host."""

    is_exact = False
    is_asynchronous = True

    def __init__(self, step_ns: int) -> None:
        self._step_ns = step_ns
        self._ends_ns = 0

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Do nothing: no block holds anything."""

    def launch(self, step: Step) -> Launched:
        self._ends_ns = max(monotonic_ns(), self._ends_ns) + self._step_ns
        return Launched(step, self._ends_ns)

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        """Do nothing: the device draws behind the forward pass that it is still computing."""

    def collect(self, launched: Launched) -> StepResult:
        while (left_ns := launched.ends_ns - monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        return StepResult([ChunkResult([65] if chunk.max_draws else []) for chunk in launched.step.chunks])


def app(args: Mapping[str, Any]) -> Any:
    """Return the application; of its arguments, `step_ms` is what a step takes."""
    settings = {"model": "demo", "log_level": "warning"} | dict(args)
    step_ms = float(settings.pop("step_ms", 10))
    return build(settings, partial(load_double, step_ms))


def load_double(step_ms: float, config: Config) -> Engine:
    model = ServedModel(
        tokenizer=Tokenizer(byte_tokenizer()),
        runner=DeviceDouble(int(step_ms * 1e6)),
        num_blocks=MOST_SEQUENCES * MAX_MODEL_LEN // 16,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=256,
    )
    return Engine(model, config.engine)
