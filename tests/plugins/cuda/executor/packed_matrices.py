"""Random matrices in the formats of quantized checkpoints."""

import torch

from oaiserve.engine.decoder.sources.integer_layouts import Floats, Integers, floats
from oaiserve.plugins.cuda.executor.device_matrices import PackedMatrix


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def integers(bits: int, n: int, columns: int, group: int, *, zeros: bool, any_order: bool = False) -> Integers:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, columns), generator=generator, dtype=torch.uint8)
    groups = columns // group
    scales = (torch.rand(n, groups, generator=generator) * 0.01 + 0.001).half()
    found = torch.randint(0, 1 << bits, (n, groups), generator=generator, dtype=torch.uint8) if zeros else None
    order = torch.randperm(columns, generator=generator) if any_order else None
    return Integers(codes, scales, found, bits, order)


def floats_in_blocks(n: int, columns: int, block: tuple[int, int] | None) -> Floats:
    codes = numbers(n, columns).to(torch.float8_e4m3fn)
    if block is None:
        return floats(codes, numbers(n).abs(), None)
    return floats(codes, numbers(-(-n // block[0]), columns // block[1]).abs(), block)


def in_blocks_of_128(weights: torch.Tensor) -> PackedMatrix:
    """Return weights as floats of 8 bits with a scale for each block of 128 rows and columns, on their device."""
    columns = weights.shape[1]
    blocks = weights.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    of_rows = scales.repeat_interleave(128, 0)
    codes = (weights / of_rows.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    padded = torch.nn.functional.pad(scales, (0, -(columns // 128) % 4))
    return PackedMatrix("float8", codes, of_rows.T.contiguous(), None, block_scales=padded)


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of what is wanted."""
    return float((found - want).norm() / want.norm())
