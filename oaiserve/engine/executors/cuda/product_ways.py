"""In which way products with packed matrices are computed, by the number of rows of x."""

from __future__ import annotations

from msgspec import Struct


class ProductWays(Struct, frozen=True, forbid_unknown_fields=True):
    """The least numbers of rows for which a product takes another way than the kernel that unpacks a matrix tile by
    tile. None is for no number."""

    # The matrix is unpacked for cuBLAS. Without a measurement on the device: by arithmetic, this saves at least the
    # time of unpacking from here on, on cards from an L4 to an H100.
    unpacked_from: int | None = 1025
    rounded_from: int | None = None  # x is rounded to floats of 8 bits, if the matrix has these, for torch's product.
    adds_fast: bool = False  # Tensor cores keep fewer bits of the sums of such products.

    def unpacks(self, num_rows: int) -> bool:
        return self.unpacked_from is not None and num_rows >= self.unpacked_from

    def rounds(self, num_rows: int) -> bool:
        return self.rounded_from is not None and num_rows >= self.rounded_from


UNMEASURED = ProductWays()
