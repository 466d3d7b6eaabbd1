"""Notes launches of Triton's kernels that compute nothing, each variant once: what is compiled for a GPU."""

from __future__ import annotations

import importlib
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNED_BYTES = 16  # Triton has other code for addresses and numbers that are multiples of this


@dataclass(frozen=True, slots=True)
class Variant:
    """The arguments of one launch, as far as the code of the kernel depends on them."""

    module: str
    kernel: str
    arguments: str  # JSON: by parameter, a number, a constant, or [dtype, whether it is aligned] for a tensor

    def launch_arguments(self) -> dict[str, Any]:
        """Return arguments like those of the launch, with a stand-in for each tensor."""
        return {
            name: Pointer(getattr(torch, one[0]), 0 if one[1] else 8) if isinstance(one, list) else one
            for name, one in json.loads(self.arguments).items()
        }

    def function(self) -> Any:
        return getattr(importlib.import_module(self.module), self.kernel)

    def __str__(self) -> str:
        """Return the kernel with its constants and the types of its tensors."""
        found = json.loads(self.arguments)
        types = sorted({one[0] for one in found.values() if isinstance(one, list)})
        constants = {name: one for name, one in found.items() if name.isupper() and not isinstance(one, list)}
        return f"{self.kernel} ({', '.join(types)}; {', '.join(f'{name} {one}' for name, one in constants.items())})"


class Pointer:
    """Stands for a tensor where a kernel is compiled."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Noted(NamedTuple):
    """The launches of a process, and the memory that it had on the device."""

    counts: dict[Variant, int]  # the number of launches of each variant
    peak_bytes: int  # the most that weights and KV caches took together


class Launches:
    """The variants that were launched, with the number of launches of each."""

    def __init__(self) -> None:
        self.counts: dict[Variant, int] = {}
        self._num_bytes = 0
        self._peak_bytes = 0
        self._known: dict[tuple[Any, ...], Variant] = {}

    def noted(self, kernel: Any) -> NotedKernel:
        """Return the replacement of a kernel."""
        return NotedKernel(kernel, self)

    def note(self, kernel: Any, arguments: dict[str, Any]) -> None:
        parameters = {parameter.name: parameter for parameter in kernel.params}
        key = (kernel.fn.__name__, *((name, _in_key(one, parameters.get(name))) for name, one in arguments.items()))
        variant = self._known.get(key)
        if variant is None:
            said = json.dumps({name: _said(one) for name, one in arguments.items()})
            variant = self._known[key] = Variant(kernel.fn.__module__, kernel.fn.__name__, said)
        self.counts[variant] = self.counts.get(variant, 0) + 1

    def hold(self, owner: object, num_bytes: int) -> None:
        """Count memory of the device for as long as its owner lives."""
        self._num_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._num_bytes)
        weakref.finalize(owner, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes

    def write(self, path: Path) -> None:
        rows = [[one.module, one.kernel, one.arguments, count] for one, count in self.counts.items()]
        path.write_text(json.dumps([rows, self._peak_bytes]))


def read(path: Path) -> Noted:
    """Return the launches that a process has written; none if it died."""
    rows, peak_bytes = json.loads(path.read_text()) if path.exists() else ([], 0)
    return Noted({Variant(*row): count for *row, count in rows}, peak_bytes)


class NotedKernel:
    """Replaces a kernel: notes a launch."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self._kernel = kernel
        self._launches = launches
        self._names = [parameter.name for parameter in kernel.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not all(type(size) is int and size >= 0 for size in grid) or any(size >= 1 << 16 for size in grid[1:]):
            raise ValueError(f"{self._kernel.fn.__name__} cannot have the grid {grid}")
        return self if all(grid) else _nothing

    def __call__(self, *positional: Any, **named: Any) -> None:
        self._launches.note(self._kernel, dict(zip(self._names, positional, strict=False)) | named)


def _nothing(*positional: Any, **named: Any) -> None:
    """Stands for a kernel without programs, which Triton does not launch."""


def _in_key(argument: Any, parameter: Any) -> Any:
    """Return everything about an argument on which the code of the kernel depends. An option has no parameter."""
    if isinstance(argument, Tensor):
        return argument.dtype, parameter.do_not_specialize_on_alignment or _is_aligned(argument)
    if parameter is None or parameter.is_constexpr or argument is None:
        return type(argument), argument
    if type(argument) is not int:
        return type(argument)
    is_short = -(1 << 31) <= argument < 1 << 31
    if parameter.do_not_specialize:
        return is_short
    return is_short, argument == 1, argument % _ALIGNED_BYTES == 0


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether the tensor begins at an aligned address, if its memory does, as all memory of a GPU."""
    return tensor.storage_offset() * tensor.itemsize % _ALIGNED_BYTES == 0


def _said(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return [str(argument.dtype).removeprefix("torch."), _is_aligned(argument)]
    return argument
