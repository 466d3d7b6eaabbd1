"""Low-rank adapters (LoRA) and their loading. Their tensors add to the products of some linear layers of a model.

A layer with weights W computes x W^T + scale * (x A^T) B^T for the rows of a step that use the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import RawIOBase
from pathlib import Path

import torch
from torch import Tensor

from oaiserve.checkpoints.adapters import AdapterFiles, BadAdapter, StoredTensor, read_adapter
from oaiserve.engine.decoder.sources.wrapped_names import text_name
from oaiserve.errors import StartupError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PROBE_SCALE = 0.3


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The two narrow matrices of an adapter for one linear layer."""

    a: Tensor  # [rank, columns of W], in the model's dtype
    b: Tensor  # [rows of W, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def added(self, x: Tensor) -> Tensor:
        """Return the addition to the product of the rows `x` [..., columns]."""
        return (x @ self.a.T * self.scale) @ self.b.T


@dataclass(frozen=True, eq=False)  # Adapters are keys, compared by identity.
class Adapter:
    name: str
    parts: Mapping[str, AdapterPart]

    @cached_property
    def rank(self) -> int:
        return max(part.rank for part in self.parts.values())


def probe_adapter(
    shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device, rank: int
) -> Adapter:
    """Return an adapter that changes results, for layers of these shapes, by name. Each call returns the same one."""
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for name, (rows, columns) in sorted(shapes.items()):
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) / rank**0.5
        parts[name] = AdapterPart(a.to(device, dtype), b.to(device, dtype), _PROBE_SCALE)
    return Adapter("probe", parts)


def refuse_unless_they_fit(adapters: Mapping[str, Path], adaptable: Mapping[str, tuple[int, int]]) -> None:
    """Raise StartupError if an adapter, in a folder keyed by its name, doesn't fit the model.

    It reads no weights, so that a start, which may take minutes, can check the adapters first.
    """
    for name, path in adapters.items():
        try:
            _refuse_unless_it_fits(read_adapter(path), adaptable)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}={path} cannot be used: {error}.") from error


def load_adapter(
    name: str, files: AdapterFiles, adaptable: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Load an adapter in the model's dtype. `adaptable` has the rows and columns of the model's layers.

    Raises BadAdapter for an adapter of another model, or for numbers that are not finite.
    """
    _refuse_unless_it_fits(files, adaptable)
    try:
        # Read, not mapped: if someone truncates a mapped file, the system kills the process.
        with files.weights.open("rb", buffering=0) as file:

            def read(stored: StoredTensor) -> Tensor:
                tensor = _tensor(file, stored, files.weights).to(device, dtype)
                if not tensor.isfinite().all():
                    raise BadAdapter(
                        f"'{files.weights}': its tensor '{stored.name[:200]}' has numbers that are not finite"
                    )
                return tensor

            parts = {
                text_name(module): AdapterPart(read(part.a), read(part.b), part.scale)
                for module, part in files.modules.items()
            }
    except OSError as error:
        raise BadAdapter(f"'{files.weights}': {error.strerror}") from error
    return Adapter(name, parts)


def _tensor(file: RawIOBase, stored: StoredTensor, path: Path) -> Tensor:
    """Read a tensor from the file of weights. Raises BadAdapter and OSError."""
    dtype = _DTYPES[stored.dtype]
    content = bytearray(math.prod(stored.shape) * dtype.itemsize)
    file.seek(stored.offset)
    num_read = 0
    while num_read < len(content):
        if not (num_more := file.readinto(memoryview(content)[num_read:])):
            raise BadAdapter(f"'{path}': it has changed while it was read")
        num_read += num_more
    return torch.frombuffer(content, dtype=dtype).view(stored.shape)


def _refuse_unless_it_fits(files: AdapterFiles, adaptable: Mapping[str, tuple[int, int]]) -> None:
    """Raise BadAdapter unless each tensor has the shape for its layer of the model."""
    for module, part in files.modules.items():
        # An adapter that was trained on a multimodal checkpoint uses that checkpoint's names of modules.
        if (own_module := text_name(module)) not in adaptable:
            raise BadAdapter(
                f"'{files.weights}': it adapts '{module[:200]}', which is no linear layer in the model's decoder"
            )
        rows, columns = adaptable[own_module]
        for tensor, shape in ((part.a, (part.rank, columns)), (part.b, (rows, part.rank))):
            if tensor.shape != shape:
                raise BadAdapter(
                    f"'{files.weights}': its tensor '{tensor.name[:200]}' has the shape {list(tensor.shape)}, and the "
                    f"model's '{module}' needs {list(shape)}"
                )
