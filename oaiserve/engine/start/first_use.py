"""Settings that must be made before torch computes anything in this process."""

from __future__ import annotations

from functools import cache

import torch

from oaiserve.config import CpuFeatures
from oaiserve.engine.executors.native.build import limit_features
from oaiserve.engine.model.device import limit_compiled_shapes

# The functions of torch that MKL computes, and some that it computes only in certain versions of torch.
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10"),
    *("log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


def prepare_torch(cpu_features: CpuFeatures) -> None:
    """Set torch's limits, and let it choose its code before several threads compute.

    Raises StartupError if torch has already computed with instructions that `cpu_features` forbids.
    """
    limit_features(cpu_features)
    limit_compiled_shapes()
    choose_vector_functions()


@cache
def choose_vector_functions() -> None:
    """Call each function of `VECTOR_FUNCTIONS` once, in this thread alone.

    MKL chooses the code of each function at its first call. If two threads make that call at once, as for a table of
    rotary embeddings, one of them may get code that is accurate to only 12 bits:
    https://github.com/pytorch/pytorch/issues/188792
    """
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(number)
