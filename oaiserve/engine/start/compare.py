"""The comparisons of a start: two ways to compute the same must give the same, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

# Two ways to compute logits may differ by so much, relative to their norm. A wrong computation differs by more than
# this, and different rounding by far less.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1  # bfloat16 and float16
QUANTIZED_TOLERANCE = 0.3
# Both ways round keys and values to eight bits, but a number between two integers may be rounded up by one way only.
INT8_CACHE_TOLERANCE = 0.02
# A layer's output may differ by less than logits: it rounds its weights and its results once.
_LAYER_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
# What rounding to 16 bits may change in a module: several times what it does in all families that were tried.
HALF_LIMIT = 0.05
_ROUNDINGS = 8  # how many times as far apart two ways to attend may be as attention with queries that round otherwise
_NUMBERS = ("layer_idx", "layer_id")  # of their layers, which modules that attend have

T = TypeVar("T")


class Difference(NamedTuple):
    """How far two results are apart, and how far rounding may bring them."""

    what: str
    apart: float  # as `difference` has it
    limit: float

    @property
    def is_beyond_rounding(self) -> bool:
        return not self.apart <= self.limit  # NaN, too

    def __str__(self) -> str:
        return f"{self.what} would differ by {self.apart:.1%} (allowed: {self.limit:.1%})"


def compare(
    candidate: Callable[[T], Tensor], reference: Callable[[T], Tensor], batches: Iterable[tuple[str, T]], limit: float
) -> Difference | None:
    """Compute each named batch in two ways. None if all results agree but for rounding, or else the worst difference.

    The reference comes first, and is copied: both may write their results into the same memory.
    """
    pairs = ((name, reference(batch).clone(), batch) for name, batch in batches)
    return worst((Difference(name, difference(candidate(batch), want), limit) for name, want, batch in pairs))


def worst(found: Iterable[Difference]) -> Difference | None:
    """Find the largest of the differences beyond rounding; NaN is larger than all."""
    beyond = [one for one in found if one.is_beyond_rounding]
    return max(beyond, key=lambda one: torch.inf if one.apart != one.apart else one.apart, default=None)


def difference(logits: Tensor, expected: Tensor) -> float:
    """Compute the norm of the difference of two tensors, relative to the norm of `expected`."""
    return float((logits.float() - expected.float()).norm() / expected.float().norm())


def tolerance(dtype: torch.dtype, *, is_quantized: bool = False) -> float:
    """Choose the largest `difference` that rounding explains in logits of a model computed in `dtype`."""
    if is_quantized:
        return QUANTIZED_TOLERANCE
    return FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE


def layer_tolerance(dtype: torch.dtype) -> float:
    """Choose the largest `difference` that rounding explains between two results of one layer, or of a part of it."""
    return _LAYER_TOLERANCES[dtype]


class ModuleOutputs:
    """Records what modules of a model give in a run, and compares another run with that, in another way to compute.

    In the second run, each module that differs between the two gives what it gave in the first one, once that has been
    compared. So rounding in a layer does not grow in those behind it, and a wrong layer is not hidden by many others.
    """

    def __init__(self, model: Module, dtype: torch.dtype, mixer: str | None) -> None:
        """Compare modules of the class `mixer`, and those that are running when `attends` is called."""
        self._limit = FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_LIMIT
        self._names = {
            module: name for name, module in model.named_modules() if any(hasattr(module, own) for own in _NUMBERS)
        }
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
            # Layers that were added to a trained model may give nothing but zeros.
            apart = 0.0 if output.equal(expected) else difference(output, expected)
            self.found.append(Difference(self._names[module], apart, self._limits[module]))
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
