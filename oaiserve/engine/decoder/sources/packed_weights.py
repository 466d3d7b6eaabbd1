"""The weights of a quantized checkpoint, under transformers' names.

Each matrix is stored as several tensors, whose names begin with the name of its module: AWQ's and GPTQ's `qweight`,
`qzeros` and `scales`, or compressed-tensors' `weight_packed` (or `weight`) and `weight_scale`. The packages that define
these formats are not needed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.quantization import Quantization
from oaiserve.engine.decoder.blocks import Blocks, of_integers
from oaiserve.engine.decoder.sources import integer_layouts
from oaiserve.engine.decoder.sources.integer_layouts import BadLayout, Floats, Integers
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.sources.unread_matrix import UnreadMatrix
from oaiserve.errors import StartupError

# The last parts of the names of tensors that aren't parameters of a model.
_NO_PARAMETERS = {
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_scale_inv"),
    # Scales of 8-bit activations, keys and values. We compute scales from the values themselves instead, or don't
    # round.
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale"),
    *("input_scale_ub", "activation_scale", "kv_scale"),
    "inv_freq",  # follows from config.json
}


class PackedWeights(TensorFiles):
    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization,
        *,
        of_wrapper: bool = False,
        is_long: bool = False,
        reads_later: bool = False,
    ) -> None:
        """Map the files. Raises StartupError without a packed matrix. `is_long` is passed to `of_integers`.

        With `reads_later`, packed matrices, including floats, take no memory until an executor reads them.
        """
        self._quantization = quantization
        self._is_long = is_long
        self._reads_later = reads_later
        super().__init__(checkpoint, of_wrapper=of_wrapper)
        self._found_by: dict[str, str] = {}  # for each matrix, the tensor with its integers
        for name in self._places:
            base, _, last = name.rpartition(".")
            if last in ("qweight", "weight_packed"):
                self._found_by[f"{base}.weight"] = name
            elif last in ("weight_scale", "weight_scale_inv") and f"{base}.weight" in self:
                self._found_by[f"{base}.weight"] = f"{base}.weight"
        if not self._found_by:
            raise StartupError(
                f"'{checkpoint.folder}' cannot be used: it has no weights in the layout that its config.json names."
            )

    def names(self) -> set[str]:
        others = {name for name in self._places if name.rpartition(".")[2] not in _NO_PARAMETERS}
        return others | self._found_by.keys()

    def zero_biases(self) -> set[str]:
        """Return the names of the biases that AutoAWQ adds to every matrix, all of them zero."""
        found_by = self._found_by.keys()
        biases = {bias for name in found_by if (bias := f"{name.removesuffix('.weight')}.bias") in self}
        return {name for name in biases if not self.tensor(name).any()}

    def has_blocks(self) -> bool:
        """Return whether any packed weights are integers, which fit into quantization blocks. 8-bit floats don't."""
        return any(self.kind(found_by) != "F8_E4M3" for found_by in self._found_by.values())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._found_by:
            return super().shape(name)
        base = name.removesuffix(".weight")
        found_by = self._found_by[name]
        if found_by.endswith(".weight"):
            return super().shape(found_by)
        if found_by.endswith(".weight_packed"):
            return self._sizes(base)
        rows, columns = super().shape(found_by)
        if self._quantization.method == "awq":
            return columns * 8, rows
        return columns, rows * 32 // self._bits_of_gptq(base)

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in quantization blocks with the same integers, or None if the tensor must be expanded."""
        if name not in self._found_by:
            return None
        if self._reads_later:
            return UnreadMatrix.of(self.shape(name), partial(self._read_checked, name))
        matrix = self.matrix(name)
        blocks = None
        if isinstance(matrix, Integers):
            blocks = of_integers(*matrix, is_long=self._is_long)
        self.give_back()
        return blocks

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in the form that the model's code uses. Packed ones are expanded to float32."""
        matrix = self.matrix(name)
        if matrix is None:
            return super().tensor(name)
        return matrix.expand()

    def matrix(self, name: str) -> Integers | Floats | None:
        """Return a packed matrix, or None for any other tensor."""
        if name in self._found_by:
            return self._read_checked(name)
        return None

    def _read_checked(self, name: str) -> Integers | Floats:
        found_by = self._found_by[name]
        size = self._quantization.group_size
        try:
            integers = self._read(name.removesuffix(".weight"), found_by)
        except BadLayout as error:
            raise self.refusal(found_by, str(error)) from error
        k = integers.codes.shape[1]
        groups = integers.scales.shape[1]
        if size is not None and groups * (k if size == -1 else size) != k:
            raise self.refusal(found_by, f"has {groups} groups for {k} columns; config.json says {size} for each")
        return integers

    def _read(self, base: str, found_by: str) -> Integers | Floats:
        weight = super().tensor(found_by)
        if found_by.endswith(".qweight"):
            zeros = self._part(found_by, "qzeros")
            scales = self._part(found_by, "scales")
            if self._quantization.method == "awq":
                return integer_layouts.awq(weight, zeros, scales)
            g_idx = self._optional(base, "g_idx")
            bits = self._bits_of_gptq(base)
            less_one = self._quantization.zeros_less_one
            return integer_layouts.gptq(weight, zeros, scales, g_idx, bits, zeros_less_one=less_one)
        if weight.dtype == torch.float8_e4m3fn:
            scale = self._optional(base, "weight_scale_inv")
            if scale is None:
                scale = self._part(found_by, "weight_scale")
            return integer_layouts.floats(weight, scale, self._quantization.block)
        parts = self._part(found_by, "weight_scale"), self._optional(base, "weight_zero_point")
        g_idx = self._optional(base, "weight_g_idx")
        if found_by.endswith(".weight"):
            return integer_layouts.whole(weight, *parts, g_idx)
        n, k = self._sizes(base)
        bits = 8 if 0 <= weight.shape[-1] * 4 - k < 4 else 4
        integers = integer_layouts.packed(weight, *parts, g_idx, bits, k)
        if len(integers.codes) != n:
            raise BadLayout(f"has {len(integers.codes)} rows, but its weight_shape says {n}")
        return integers

    def _bits_of_gptq(self, base: str) -> int:
        if self._quantization.bits is not None:
            return self._quantization.bits
        weight = f"{base}.qweight"
        groups = f"{base}.g_idx"
        rows = super().shape(weight)[0]
        columns = super().shape(groups)[0] if groups in self else 0
        for bits in (4, 8):
            if rows * 32 == columns * bits:
                return bits
        raise self.refusal(weight, f"has {rows} rows, which are not {columns} columns of 4 or 8 bits")

    def _sizes(self, base: str) -> tuple[int, int]:
        name = f"{base}.weight_packed"
        sizes = self._part(name, "weight_shape").flatten().tolist()
        if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
            raise self.refusal(name, f"has the weight_shape {sizes[:4]}, which is none of a matrix")
        return sizes[0], sizes[1]

    def _part(self, found_by: str, last: str) -> Tensor:
        part = self._optional(found_by.rpartition(".")[0], last)
        if part is None:
            raise self.refusal(found_by, f"has no {last} next to it")
        return part

    def _optional(self, base: str, last: str) -> Tensor | None:
        name = f"{base}.{last}"
        if name in self:
            return super().tensor(name)
        return None
