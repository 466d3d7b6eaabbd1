"""Compares two ways to compute a model by what its modules that attend, or keep a state, give for the same input.

Compared are only the modules that differ between the two ways. In the second one, each of them gives what it gave in
the first one, once that has been compared. So all of the second run has the inputs of the first one: what rounding
changes in a layer does not grow in the layers behind it, and a wrong layer is not hidden by the many beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, Difference, difference

# What rounding to 16 bits may change in a module: several times what it does in all families that were tried.
HALF_LIMIT = 0.05
_ROUNDINGS = 8  # how many times as far apart two ways to attend may be as attention with queries that round otherwise
_NUMBERS = ("layer_idx", "layer_id")  # of their layers, which modules that attend have


class ModuleOutputs:
    """Records what modules of a model give in a run, and compares another run with that."""

    def __init__(self, model: Module, dtype: torch.dtype, mixer: str | None) -> None:
        """Compare modules of the class `mixer`, and those that are running when `attends` is called."""
        self._limit = FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_LIMIT
        self._names = {module: name for name, module in model.named_modules() if _is_of_layer(module)}
        self._limits = {module: self._limit for module in self._names if type(module).__name__ == mixer}
        self._running: list[Module] = []
        self._recorded: dict[Module, list[Tensor]] = {}  # [T, width] of each call
        self.found: list[Difference] = []  # since the last `recorded`

    def attends(self, rounding: float) -> None:
        """Compare the innermost module that is running, of those that know their layer.

        `rounding` says how far its attention is from that with queries that are rounded otherwise. That is far where
        scores are large, as scores are rounded, too.
        """
        if self._running:
            self._limits[self._running[-1]] = max(self._limit, _ROUNDINGS * rounding)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what the modules give in the forward within."""
        self._recorded, self.found = {}, []

        def record(module: Module, output: Tensor) -> None:
            self._recorded.setdefault(module, []).append(output.flatten(0, -2).clone())

        with self._hooked(record):
            yield

    @contextmanager
    def compared(self, start: int = 0) -> Iterator[None]:
        """Compare the forward within, whose tokens are those of the recorded one from `start` on."""
        num_calls: dict[Module, int] = {}  # of modules that several layers share

        def compare(module: Module, output: Tensor) -> Tensor | None:
            if module not in self._limits:
                return None
            call = num_calls[module] = num_calls.get(module, -1) + 1
            expected = self._recorded[module][call][start:][: output[..., 0].numel()].view_as(output)
            self.found.append(Difference(self._names[module], _difference(output, expected), self._limits[module]))
            return expected

        with self._hooked(compare):
            yield

    def beyond_rounding(self) -> str:
        """Return by how much the first output differs that differs by more than rounding explains; "" if none does."""
        for found in self.found:
            if found.is_beyond_rounding:
                place = f" in '{found.what}'" if found.what else ""
                return f"by {found.apart:.1%} (allowed: {found.limit:.1%}){place}"
        return ""

    @contextmanager
    def _hooked(self, handle: Callable[[Module, Tensor], Tensor | None]) -> Iterator[None]:
        """Call `handle` with what each module gives, and have it give what that returns, unless it is None."""

        def before(module: Module, _: Any) -> None:
            self._running.append(module)

        def behind(module: Module, _: Any, output: Any) -> Any:
            self._running.pop()
            first, *rest = output if isinstance(output, tuple) else (output,)
            replaced = handle(module, first) if isinstance(first, Tensor) else None
            if replaced is None:
                return None
            return (replaced, *rest) if isinstance(output, tuple) else replaced

        handles = []
        for module in self._names:
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(behind)]
        try:
            yield
        finally:
            self._running.clear()
            for handle_ in handles:
                handle_.remove()


def _is_of_layer(module: Module) -> bool:
    return any(hasattr(module, name) for name in _NUMBERS)


def _difference(output: Tensor, expected: Tensor) -> float:
    """Return their difference. Layers that were added to a trained model may give nothing but zeros."""
    return 0.0 if output.equal(expected) else difference(output, expected)
