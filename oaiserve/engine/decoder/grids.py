"""The grids of the GGUF formats IQ1, IQ2 and IQ3, whose codes are indices into a table of points.

gguf-py, the reference of these formats, defines each table by the indices of its values, packed in a few bits each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

# Keyed by the format's number in GGUF files: the factor and the addend that native code applies to points. See
# src/grids.h.
IN_NATIVE_CODE = {16: (1, 0), 17: (1, 0), 18: (2, 0), 19: (8, 1), 21: (8, 0), 22: (1, 0), 29: (8, 1)}


@cache
def points_of(kind: int) -> NDArray[np.int8]:
    """imported here because it is rarely needed"""
    from gguf import GGMLQuantizationType, quants  # rarely needed, so imported only here

    definition = getattr(quants, GGMLQuantizationType(kind).name)
    definition.init_grid()
    factor, summand = IN_NATIVE_CODE[kind]
    return np.ascontiguousarray(definition.grid[0, 0] * factor + summand, np.int8)
