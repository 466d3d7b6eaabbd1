"""The comparisons of a start: two ways to compute the same must give the same, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.start.float32 import InFloat32, cast

# Two ways to compute logits may differ by so much, relative to their norm. A wrong computation differs by more than
# this, and different rounding by far less.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1  # bfloat16 and float16
QUANTIZED_TOLERANCE = 0.3
# A layer's output may differ by less than logits: it rounds its weights and its results once.
_LAYER_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
_LEAST_ROW = 1e-3  # size of a row relative to the largest one; a smaller one counts as this large
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


def difference_by_row(found: Tensor, expected: Tensor) -> float:
    """Compute the largest `difference` of the rows [..., width] of two tensors.

    Rows of next to nothing, such as those of a layer that was added to a trained model, count as larger.
    """
    expected = expected.double()
    sizes = expected.norm(dim=-1)
    least = min(float(sizes.max()) * _LEAST_ROW, float(sizes.mean()) / 10)
    apart = (found.double() - expected).norm(dim=-1) / sizes.clamp(min=max(least, torch.finfo(torch.float32).tiny))
    return float(apart.max())


def tolerance(dtype: torch.dtype, *, is_quantized: bool = False) -> float:
    """Choose the largest `difference` that rounding explains in logits of a model computed in `dtype`."""
    if is_quantized:
        return QUANTIZED_TOLERANCE
    return FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE


def layer_tolerance(dtype: torch.dtype) -> float:
    """Choose the largest `difference` that rounding explains between two results of one layer, or of a part of it."""
    return _LAYER_TOLERANCES[dtype]


class ModuleOutputs:
    """Records the outputs of a model's modules in one run, and compares those of another way to compute with them.

    The compared modules are those that attend or keep a state. Both runs compute them in float32, whatever the dtype of
    the model, from the same inputs: so correct modules agree to the last digits, however large their scores are, and a
    small mistake is not taken for rounding. After its comparison, a module returns its recorded output, so that each
    module is compared by itself.
    """

    def __init__(self, model: Module, mixer: str | None) -> None:
        """Prepare to compare modules of the class `mixer`, and those that are running when `attends` is called."""
        numbered = {
            module: name for name, module in model.named_modules() if any(hasattr(module, own) for own in _NUMBERS)
        }
        # The innermost ones: a decoder layer may have a number, too.
        self._names = {
            module: name
            for module, name in numbered.items()
            if not any(part in numbered for part in module.modules() if part is not module)
        }
        self._compared = {module for module in self._names if type(module).__name__ == mixer}
        self._running: list[InFloat32] = []
        self._recorded: dict[Module, list[Tensor]] = {}  # float32 [T, width] of each call
        self.found: list[Difference] = []  # since the last `recorded`

    def attends(self) -> None:
        """Compare the module that is running."""
        if self._running:
            self._compared.add(self._running[-1].module)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the modules' outputs in the forward within."""
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
            if module not in self._compared:
                return None
            call = num_calls[module] = num_calls.get(module, -1) + 1
            expected = self._recorded[module][call][start:][: output[..., 0].numel()].view_as(output)
            apart = difference_by_row(output, expected)
            self.found.append(Difference(self._names[module], apart, FLOAT32_TOLERANCE))
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
        """Compute the modules in float32, and call `handle` with each output, which what it returns replaces."""

        def before(module: Module, args: Any, kwargs: Any) -> Any:
            self._running.append(InFloat32(module))
            return cast(args, torch.float32), cast(kwargs, torch.float32)

        def after(module: Module, _: Any, output: Any) -> Any:
            dtype = self._running.pop().restore()
            first, *rest = output if isinstance(output, tuple) else (output,)
            replaced = handle(module, first)
            first, *rest = cast([first if replaced is None else replaced, *rest], dtype)
            return (first, *rest) if isinstance(output, tuple) else first

        handles = []
        for module in self._names:
            handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
        try:
            yield
        finally:
            while self._running:
                self._running.pop().restore()
            for handle_ in handles:
                handle_.remove()
