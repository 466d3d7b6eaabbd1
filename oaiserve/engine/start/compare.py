"""Compares results during a start: two ways to compute the same thing must agree, apart from rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# Logits computed in two ways may differ by this much, relative to their norm. A wrong computation differs by more, and
# different rounding by far less.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.1  # tolerance for bfloat16 and float16
# Neighbouring 8-bit floats are 6 to 12 % apart, so a difference in the last bit of bfloat16 can change a key by that
# much. Noise of that size in queries, keys and values moved the logits of small models by up to 15 %.
FLOAT8_TOLERANCE = 0.3
_LEAST_ROW = 1e-3  # size of a row relative to the largest one; smaller rows count as this large
_MOST_AT_ONCE = 2**18  # numbers in double precision: the logits of a prompt, with a large vocabulary, take gigabytes

T = TypeVar("T")


class Difference(NamedTuple):
    """The distance between two results, and the largest distance that rounding explains."""

    what: str
    apart: float  # result of `difference`
    limit: float

    @property
    def is_beyond_rounding(self) -> bool:
        return not self.apart <= self.limit  # NaN, too

    def __str__(self) -> str:
        return f"{self.what} would differ by {self.apart:.1%} (allowed: {self.limit:.1%})"


def compare(
    candidate: Callable[[T], Tensor], reference: Callable[[T], Tensor], batches: Iterable[tuple[str, T]], limit: float
) -> Difference | None:
    """Compute each named batch in two ways. Return None if all results agree up to rounding, else the worst difference.

    The reference comes first, and is copied: both may write their results into the same memory.
    """
    pairs = ((name, reference(batch).clone(), batch) for name, batch in batches)
    return worst((Difference(name, difference(candidate(batch), want), limit) for name, want, batch in pairs))


def worst(differences: Iterable[Difference]) -> Difference | None:
    """Find the largest of the differences beyond rounding; NaN is larger than all."""
    beyond = [one for one in differences if one.is_beyond_rounding]
    return max(beyond, key=lambda one: torch.inf if one.apart != one.apart else one.apart, default=None)


def difference(logits: Tensor, expected: Tensor) -> float:
    """Compute the norm of the difference of two tensors, relative to the norm of `expected`."""
    return float((logits.float() - expected.float()).norm() / expected.float().norm())


def difference_by_row(values: Tensor, expected: Tensor) -> float:
    """Compute the largest `difference` of the rows [..., width] of two tensors.

    Rows of tiny numbers, such as those of a layer that was added to a trained model, count as larger ones.
    """
    width = expected.shape[-1]
    num_rows = max(1, _MOST_AT_ONCE // width)
    pieces = (one.reshape(-1, width).split(num_rows) for one in (values, expected))
    norms = []
    for own, wanted in zip(*pieces, strict=True):
        exact = wanted.double()
        norms.append(torch.stack([exact.norm(dim=-1), (own.double() - exact).norm(dim=-1)]))
    sizes, errors = torch.cat(norms, dim=1)
    least = min(float(sizes.max()) * _LEAST_ROW, float(sizes.mean()) / 10)
    return float((errors / sizes.clamp(min=max(least, torch.finfo(torch.float32).tiny))).max())


def tolerance(dtype: torch.dtype, *, in_float8: bool = False) -> float:
    """Choose the largest `difference` that rounding explains in logits computed in `dtype`. With `in_float8`, keys or
    the inputs of products are 8-bit floats."""
    if in_float8:
        return FLOAT8_TOLERANCE
    return FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
