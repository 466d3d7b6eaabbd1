"""The points of GGUF formats whose codes are places in a table: IQ1, IQ2 and IQ3.

gguf-py, the reference of these formats, defines each table by the places of its numbers, packed in a few bits each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

# The formats by their numbers in GGUF files: what native code multiplies a point with, and adds. See src/grids.h.
IN_NATIVE_CODE = {16: (1, 0), 17: (1, 0), 18: (2, 0), 19: (8, 1), 21: (8, 0), 22: (1, 0), 29: (8, 1)}


@cache
def points_of(kind: int) -> NDArray[np.int8]:
    """Return the points of a format [places, weights of a point] as native code takes them."""
    from gguf import GGMLQuantizationType, quants  # only a few starts need it

    definition = getattr(quants, GGMLQuantizationType(kind).name)
    definition.init_grid()
    factor, summand = IN_NATIVE_CODE[kind]
    return np.ascontiguousarray(definition.grid[0, 0] * factor + summand, np.int8)
