"""Measures from how many rows on a product with a packed matrix takes less time if the matrix is unpacked first."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from oaiserve.engine.model.gpu.device_matrices import ExpertMatrices, Multiply, PackedMatrix
from oaiserve.engine.start.gpu.timing import Seconds, device_seconds

log = logging.getLogger(__name__)

UNPACKED_ROWS = (512, 1024, 2048)  # possible limits for unpacking, above the decodes of most steps


@torch.inference_mode()
def unpacking_where_faster(
    matrices: Sequence[PackedMatrix],
    dtype: torch.dtype,
    multiply: Callable[..., torch.Tensor],
    seconds: Seconds = device_seconds,
) -> Multiply:
    """Return the products that unpack a matrix from the number of rows on where this takes less time, as is measured
    with the largest. Without packed matrices, nothing is measured."""
    dense = (one for one in matrices if not isinstance(one, ExpertMatrices))
    matrix = max(dense, key=lambda one: one.codes.numel(), default=None)
    if matrix is None:
        return multiply
    for num_rows in UNPACKED_ROWS:
        x = torch.randn(num_rows, matrix.shape[1], device=matrix.codes.device).to(dtype)
        packed, unpacked = (
            seconds(partial(multiply, x, matrix, None, unpacked_from=least)) for least in (num_rows + 1, num_rows)
        )
        if unpacked < packed:
            log.debug("Matrices are unpacked for %d rows or more: %.2g s, not %.2g s", num_rows, unpacked, packed)
            return partial(multiply, unpacked_from=num_rows)
    return partial(multiply, unpacked_from=sys.maxsize)
