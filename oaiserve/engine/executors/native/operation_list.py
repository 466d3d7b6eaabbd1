"""The list of a decoder's operations in native code, to which layers add theirs in turn.

Buffers, weights and operations are referred to by their indices, as in src/decoder.cpp.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oaiserve.engine.decoder.description import MLP, HeadRows, Matrix, Norm, NotKnown
from oaiserve.engine.executors.native.kv_layout import LANES
from oaiserve.engine.executors.native.library import NONE, Library, Normalize, WeightRange
from oaiserve.engine.executors.native.pack_weights import WeightPacker


class OperationList:
    def __init__(self, library: Library, handle: int, weights: WeightPacker, *, has_adapters: bool) -> None:
        """Start the list of operations for the decoder of this `handle` with these weights."""
        self.names: list[str] = []  # the kind of each operation, in order
        # Where adapters add to products: the matrices of each site, whose outputs lie side by side.
        self.sites: list[list[Matrix] | HeadRows] = []
        self.library = library
        self.handle = handle
        self.weights = weights
        self._has_adapters = has_adapters
        self._kept: list[Tensor] = []  # tensors that native code points to
        self._groups = -1  # the buffer of 8-bit inputs, which weights in blocks read

    def add(self, name: str, operation: str, *arguments: Any) -> None:
        """Add an operation and keep its tensors alive. `name` is its kind, and `operation` its name in native code."""
        self.names.append(name)
        self.library.add(self.handle, operation, *arguments, keep=self.keep)

    def floats(self, width: int, rows_each: int = 1) -> int:
        """Add a buffer of `width` floats for each token, or for each of its `rows_each` rows. Return its index."""
        return self.library.add_floats(self.handle, _whole(width), rows_each)  # type: ignore[no-any-return]

    def elements(self, width: int, rows_each: int = 1) -> int:
        return self.library.add_elements(self.handle, _whole(width), rows_each)  # type: ignore[no-any-return]

    def groups(self, width: int, rows_each: int = 1) -> int:
        return self.library.add_groups(self.handle, width, rows_each)  # type: ignore[no-any-return]

    def read_in_groups(self, most_columns: int) -> None:
        """Add the buffer for inputs of quantized weights, with at most this many columns."""
        self._groups = self.groups(most_columns)

    def keep(self, tensor: Tensor | None) -> int | None:
        """Keep a tensor alive as long as the decoder. Return its address, or None for None."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def add_norm(self, x: int, hidden: int, norm: Norm, scale: float, factor: float = 1.0) -> None:
        """Add the operation that norms `x`, adds the result to `hidden`, and then multiplies `hidden` by `factor`."""
        self.add("norm", "add_norm", x, hidden, Normalize.of(norm), scale, factor)

    def project(
        self, name: str, x: int, out: int, matrices: list[Matrix], *, adds: bool = False, scale: float = 1.0
    ) -> None:
        """Add the operation that writes the products with all `matrices`, side by side, to `out`, or adds them."""
        site = self.site(x, matrices)
        weights = self.weights.pack(matrices)
        x = self.input_of(x, weights)
        self.add(name, "project", x, out, weights, site, adds, scale)

    def project_inner(self, mlp: MLP, x: int, out: int) -> None:
        """Add the operation that writes the input of an MLP's last matrix to `out`."""
        if mlp.gate is None:
            site = self.site(x, [mlp.up])
            weights = self.weights.pack([mlp.up])
            x = self.input_of(x, weights, with_rests=True)
            self.add("up", "activate", x, out, weights, site, mlp.activation, NONE, 0)
        else:
            site = self.site(x, [mlp.gate, mlp.up])
            weights = self.weights.pack_gated(mlp.gate, mlp.up)
            x = self.input_of(x, weights, with_rests=True)
            self.add("gate and up", "gate", x, out, weights, site, mlp.activation)

    def input_of(
        self, x: int, weights: int, count: int = 1, *, of_logits_rows: bool = False, with_rests: bool = False
    ) -> int:
        """Return the input buffer of products with `count` weights from this index on.

        It is `x`, or `x` in 8 bits, for which an operation is added. For rows that need more precision, `with_rests`
        also stores the rounding errors, the rests.
        """
        if weights not in self.weights.widths:
            return x
        width = self.weights.widths[weights]
        order = self.weights.orders.get(weights)
        read_by = WeightRange(weights, count)
        self.add("quantize", "quantize", x, self._groups, width, read_by, of_logits_rows, with_rests, order, 1)
        return self._groups

    def site(self, x: int, matrices: list[Matrix] | HeadRows, heads: int = 1, each: int = 0) -> int:
        """Let adapters add to the product of `x` with these matrices, which is the next operation. Return the site.

        For `heads`, the product is computed per head: each head has its own rows, and its input begins `each` numbers
        after that of the previous head.
        """
        if not self._has_adapters:
            return NONE
        self.sites.append(matrices)
        site: int = self.library.add_site(self.handle)
        self.add("adapters", "adapt", x, site, heads, each)
        return site


def whole_lanes(width: int) -> int:
    return -(-width // LANES) * LANES


def _whole(width: int) -> int:
    """Return `width`. Raises NotKnown unless it is a multiple of LANES."""
    if width % LANES:
        raise NotKnown(f"a row of {width} numbers is no multiple of {LANES}")
    return width
