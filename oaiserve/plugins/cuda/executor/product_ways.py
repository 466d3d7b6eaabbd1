"""Which way of computing a product with a packed matrix is used, by the number of rows of x."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

PROGRAMS_PER_SM = 4  # With this many programs, enough loads are in flight to keep the memory busy.


class MatrixTiles(NamedTuple):
    rows: int  # rows of x
    n: int  # rows of the matrix
    num_warps: int
    num_stages: int
    programs_per_sm: int = PROGRAMS_PER_SM  # Columns are split until a product has this many programs.

    def constants(self) -> dict[str, int]:
        """Return the tiles as arguments of kernels."""
        rows, n, num_warps, num_stages, _ = self
        return {"TILE_ROWS": rows, "TILE_N": n, "num_warps": num_warps, "num_stages": num_stages}

    def __str__(self) -> str:
        of_kernel = f"{self.num_warps} warps, {self.num_stages} stages"
        return f"tiles of {self.rows} by {self.n} with {of_kernel}, {self.programs_per_sm} programs per multiprocessor"


class ProductWays(Struct, frozen=True, forbid_unknown_fields=True):
    """How products are computed, by their number of rows.

    Below `unpacked_from` and `rounded_from` rows, a kernel unpacks the matrix tile by tile. None: it does so for any
    number of rows.
    """

    # From this number of rows on, the matrix is unpacked for cuBLAS. Without a measurement on the device, the number is
    # an estimate: from here on, cuBLAS saves at least the time of unpacking, on cards from an L4 to an H100.
    unpacked_from: int | None = 1025
    rounded_from: int | None = None  # From here on, x is rounded to 8-bit floats if the matrix is in these.
    adds_fast: bool = False  # Tensor cores keep fewer bits of the sums of products of 8-bit floats.
    # The kernel's tiles, sorted by their rows. A product uses the tiles for as many rows as it has, or the last ones if
    # it has more. Without any, it uses the fastest ones on an H100. For experts, the number is the rows of each expert,
    # if all have equally many.
    tiles: tuple[MatrixTiles, ...] = ()
    expert_tiles: tuple[MatrixTiles, ...] = ()

    def unpacks(self, num_rows: int) -> bool:
        return self.unpacked_from is not None and num_rows >= self.unpacked_from

    def rounds(self, num_rows: int) -> bool:
        return self.rounded_from is not None and num_rows >= self.rounded_from

    def tiles_for(self, num_rows: int, *, of_experts: bool = False) -> MatrixTiles | None:
        measured = self.expert_tiles if of_experts else self.tiles
        fitting = (tiles for tiles in measured if num_rows <= tiles.rows)
        return next(fitting, measured[-1] if measured else None)


UNMEASURED = ProductWays()
