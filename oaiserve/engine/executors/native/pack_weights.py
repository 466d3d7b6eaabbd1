"""Packs a decoder's matrices for native code, in the model's dtype or in a file's blocks. Several may be packed as one.

Matrices in blocks are listed first, and then packed together in one native call. Between two calls, the thread would
wait for the GIL, which another thread may hold for up to a quarter of a second during a start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Matrix
from oaiserve.engine.executors.native.kv_layout import LANES
from oaiserve.engine.executors.native.library import Library, place_of

PANEL = 32  # rows of a matrix that native code packs together; all rows of a panel have one format
_BYTES_AT_ONCE = 2**30  # Larger models are packed in several calls, so that a progress bar moves.


class WeightPacker:
    def __init__(self, library: Library, handle: int, pool: int, before_packing: Callable[[], object]) -> None:
        """Pack weights of the decoder of this `handle` on the threads of `pool`. `before_packing` is called before each
        native call that packs blocks."""
        # The input widths of quantized weights, keyed by their index. Such inputs are rounded to 8 bits.
        self.widths: dict[int, int] = {}
        self.orders: dict[int, int] = {}  # addresses of column orders that differ from the input's, by weight
        self.num_bytes = 0
        self._library = library
        self._handle = handle
        self._pool = pool
        self._before_packing = before_packing
        self._kept: list[NDArray[np.int32]] = []  # column orders that native code points to
        self._unpacked: list[Blocks] = []
        self._unpacked_bytes = 0
        self._shared: dict[int, int] = {}  # index of a matrix in blocks, keyed by id(), because matrices may be shared

    def pack(self, matrices: list[Matrix]) -> int:
        """Pack the rows of all `matrices` as one matrix, and return its index."""
        biases = _biases(matrices)
        bias = None if biases is None else torch.cat(biases)
        blocks = [m.weight for m in matrices if isinstance(m.weight, Blocks)]
        if (
            len(blocks) == len(matrices)
            and all(len(rows) % PANEL == 0 for rows in blocks[:-1])
            and all(_have_one_order(blocks[0], rows) for rows in blocks[1:])
        ):
            return self.pack_blocks(blocks, bias)
        tensors = [self.expanded(m.weight) for m in matrices]
        if len(tensors) > 1:
            weight = torch.cat(tensors)
        else:
            weight = tensors[0].contiguous()
        n, k = weight.shape
        self.num_bytes += weight.nbytes
        return int(self._library.add_weights(self._handle, weight.data_ptr(), n, k, place_of(bias)))

    def pack_gated(self, gate: Matrix, up: Matrix) -> int:
        """Pack the gate and the up projection of an MLP so that their products lie side by side."""
        n, k = gate.weight.shape
        biases = _biases([gate, up])
        bias = None if biases is None else torch.from_numpy(_side_by_side(*(half.numpy() for half in biases)))
        if (
            isinstance(gate.weight, Blocks)
            and isinstance(up.weight, Blocks)
            and gate.weight.kind == up.weight.kind
            and _have_one_order(gate.weight, up.weight)
        ):
            rows = _side_by_side(gate.weight.addresses(), up.weight.addresses())
            self.num_bytes += gate.weight.nbytes + up.weight.nbytes
            scales = [gate.weight.scale_addresses(), up.weight.scale_addresses()]
            if scales[0] is None or scales[1] is None:
                together = None
            else:
                together = _side_by_side(scales[0], scales[1])
            kinds = np.full(len(rows) // PANEL, gate.weight.kind, np.int32)
            return self._add([gate.weight, up.weight], rows, together, kinds, len(rows), bias)
        both = [self.expanded(matrix.weight).contiguous() for matrix in (gate, up)]
        pointers = [tensor.data_ptr() for tensor in both]
        self.num_bytes += sum(tensor.nbytes for tensor in both)
        return int(self._library.add_gated_weights(self._handle, *pointers, n, k, place_of(bias)))

    def pack_blocks(self, parts: list[Blocks], bias: Tensor | None = None) -> int:
        """Pack the rows of all parts, whose formats may differ, as one matrix. A part without a bias is packed once."""
        is_shared = len(parts) == 1 and bias is None
        if is_shared and id(parts[0]) in self._shared:
            return self._shared[id(parts[0])]
        self.num_bytes += sum(part.nbytes for part in parts)
        rows = padded(np.concatenate([part.addresses() for part in parts]), PANEL)
        kinds = np.concatenate([np.full(-(-len(part) // PANEL), part.kind, np.int32) for part in parts])
        addresses_of_parts = [addresses for part in parts if (addresses := part.scale_addresses()) is not None]
        scales = padded(np.concatenate(addresses_of_parts), PANEL) if addresses_of_parts else None
        n = sum(len(part) for part in parts)
        index = self._add(parts, rows, scales, kinds, n, bias)
        if is_shared:
            self._shared[id(parts[0])] = index
        return index

    def expanded(self, weight: Tensor | Blocks) -> Tensor:
        if isinstance(weight, Blocks):
            return weight.expand(self._library.dtype)
        return weight

    def finish(self) -> None:
        """Pack all blocks that are not packed yet."""
        self._before_packing()
        self._library.pack(self._handle, self._pool)
        self._unpacked.clear()
        self._unpacked_bytes = 0

    def _add(
        self,
        parts: list[Blocks],
        rows: NDArray[np.uintp],
        scales: NDArray[np.uintp] | None,
        kinds: NDArray[np.int32],
        n: int,
        bias: Tensor | None,
    ) -> int:
        """Add a matrix with the rows of all `parts`. Their columns must have the same order as the first one's."""
        _, k = parts[0].shape
        pointers = (rows.ctypes.data, None if scales is None else scales.ctypes.data, kinds.ctypes.data)
        self._library.set_grids(part.kind for part in parts)
        index: int = self._library.add_blocks(self._handle, *pointers, n, k, place_of(bias))
        for part in parts:
            if (pages := part.pages()) is not None:
                self._library.drop_after(self._handle, *pages)
        self._unpacked += parts
        self._unpacked_bytes += sum(part.nbytes for part in parts)
        if self._unpacked_bytes >= _BYTES_AT_ONCE:
            self.finish()
        self.widths[index] = k
        if (columns := parts[0].columns) is not None:
            columns = np.ascontiguousarray(columns)
            self._kept.append(columns)
            self.orders[index] = columns.ctypes.data
        return index


def padded(numbers: NDArray[Any], multiple: int) -> NDArray[Any]:
    """Pad the numbers with zeros up to a multiple."""
    return np.append(numbers, np.zeros(-len(numbers) % multiple, numbers.dtype))


def _biases(matrices: list[Matrix]) -> list[Tensor] | None:
    """Return the biases of all matrices, with zeros for a missing one, or None if all are missing."""
    if all(matrix.bias is None for matrix in matrices):
        return None
    return [torch.zeros(len(one.weight)) if one.bias is None else one.bias.float() for one in matrices]


def _have_one_order(first: Blocks, second: Blocks) -> bool:
    """Return whether the columns of two matrices have the same order, so that they can read the same input."""
    if first.columns is None or second.columns is None:
        return first.columns is second.columns
    return np.array_equal(first.columns, second.columns)


def _side_by_side(of_gate: NDArray[Any], of_up: NDArray[Any]) -> NDArray[Any]:
    """Interleave values of the rows of both matrices like gated weights: a panel has sixteen rows of each."""
    halves = [padded(numbers, LANES).reshape(-1, 1, LANES) for numbers in (of_gate, of_up)]
    return np.concatenate(halves, axis=1).reshape(-1)
