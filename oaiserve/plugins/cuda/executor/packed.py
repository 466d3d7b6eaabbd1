"""Copies matrices in quantized blocks to a GPU, still with a few bits per weight, in the order that kernels read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import FORMATS, MXFP4, Blocks, integers_of
from oaiserve.engine.decoder.sources.integer_layouts import Floats
from oaiserve.engine.decoder.sources.unread_matrix import UnreadMatrix
from oaiserve.plugins.cuda.executor.device_matrices import PARTS, PackedMatrix, in_parts, of_integers

FLOAT8_CAPABILITY = (8, 9)


def takes_float8(device: torch.device) -> bool:
    """Return whether kernels on this GPU can compute with 8-bit floats. MI300 uses another format of them."""
    if device.type == "cuda" and torch.version.hip is not None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def packed(weight: Tensor | Blocks, device: torch.device) -> PackedMatrix | None:
    """Return a matrix in blocks on the device, or None for other tensors and for formats that no kernel reads."""
    if isinstance(weight, UnreadMatrix):
        matrix = weight.read()
        if isinstance(matrix, Floats) and not takes_float8(device):
            return None
        on_host = of_integers(matrix)
        if on_host is None:
            return None
        return on_host.to(device)
    if not isinstance(weight, Blocks) or weight.columns is not None:
        return None
    if weight.kind == MXFP4:
        return _mxfp4(weight, device)
    if (integers := integers_of(_rows(weight.data, weight.rows, device), weight.kind)) is None:
        return None
    return of_integers(integers)


def _mxfp4(weight: Blocks, device: torch.device) -> PackedMatrix | None:
    """Return a matrix in MXFP4."""
    n, columns = weight.shape
    data = _rows(weight.data, weight.rows, device)
    if weight.scales is None:  # Each block begins with its scale, and byte i has codes i and i + 16.
        blocks = data.view(n, -1, FORMATS[MXFP4].num_bytes)
        scales = blocks[..., 0]
        pairs = blocks[..., 1:]
        codes = torch.cat([pairs & 15, pairs >> 4], dim=-1)
    else:  # Each byte has two adjacent codes.
        scales = _rows(weight.scales, weight.rows, device)
        pairs = data.view(n, -1, 16)
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    return PackedMatrix("mxfp4", in_parts(codes.view(n, columns), PARTS["mxfp4"]), scales.T.contiguous(), None)


def _rows(data: np.ndarray, rows: np.ndarray, device: torch.device) -> Tensor:
    """Copy rows of a mapped file to the device."""
    return torch.from_numpy(data[rows]).to(device)
