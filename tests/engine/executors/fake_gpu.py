"""A fake GPU: torch's device `meta`, whose tensors have shapes and no numbers, so that reading one raises.

`watched` raises where tensors of host and device meet, and for copies for which a GPU's host would wait. Kernels are
replaced by doubles that check their arguments and count their launches.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.model.operations import NO_LAUNCH

GPU = torch.device("meta")


class Copies(TorchDispatchMode):
    """Raises for an operation that would make the host wait for the device, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counter[str]()  # torch's operations on the device, by name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # an operation that consists of others is seen as these
            whole = func.decompose(*args, **kwargs)
        if whole is not NotImplemented:
            return whole
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        on_device = [tensor for tensor in tensors if tensor.device == GPU]
        if (on_device or "device" in kwargs) and name not in NO_LAUNCH:
            self.launches[name] += 1
        if name == "_to_copy" and "device" in kwargs and torch.device(kwargs["device"]) != tensors[0].device:
            assert kwargs.get("non_blocking"), f"a copy from {tensors[0].device} to {kwargs['device']} waits"
            return torch.empty(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype, device=kwargs["device"])
        if on_device and len(on_device) < len(tensors):
            assert (name, args[2:]) == ("copy_", (True,)), f"{name} copies a tensor to the device and waits"
            return args[0]
        return func(*args, **kwargs)


class NumbersWritten(TorchFunctionMode):
    """Raises where a number is written to indexed elements on the device: the host waits for its copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__setitem__ and args[0].device == GPU and not isinstance(args[2], Tensor):
            places = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
            assert not places, f"the number {args[2]} is copied to the device and waits"
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Yield the launches of torch's operations, as they are counted."""
    with NumbersWritten(), Copies() as copies:
        yield copies.launches


# -- kernels -----------------------------------------------------------------------------------------------------------

_INT64 = ("slots", "seq_lens", "block_tables", "table_rows", "last_visible", "chosen")
_INT32 = ("items", "num_items", "num_done", "order", "tile_expert", "tile_first", "tile_end")
_FLOAT32 = ("partial", "log_weights")
DTYPES = {
    **dict.fromkeys(_INT64, torch.int64),
    **dict.fromkeys(_INT32, torch.int32),
    **dict.fromkeys(_FLOAT32, torch.float32),
}
# Parameters that are read only if a constant is true.
READ_IF = {
    "positions": ("ROTARY_DIM", torch.int64),
    "cosines": ("ROTARY_DIM", torch.float32),
    "sines": ("ROTARY_DIM", torch.float32),
    "query_norm": ("HAS_NORMS", torch.float32),
    "key_norm": ("HAS_NORMS", torch.float32),
    "sinks": ("HAS_SINKS", torch.float32),
    "weight": ("HAS_NORM", torch.float32),
    "out_weight": ("HAS_OUT_NORM", torch.float32),
    "last_visible": ("LOOKS_AHEAD", torch.int64),
    "partial": ("IS_SPLIT", torch.float32),
}
# Tensors in the model's dtype. Kernels assume that the numbers of a row, or of a token, are adjacent.
IN_MODEL_DTYPE = ("query", "key", "value", "hidden", "first", "second", "x", "products", "out")
CONTIGUOUS = ("keys", "values")  # in the model's dtype, or in eight bits
_OF_ADAPTERS = {"products": torch.float32, "table": torch.int64}
# Of parameters of kernels that are not in the model's dtype.
OWN_DTYPES: dict[str, dict[str, torch.dtype]] = {
    "shrink_kernel": _OF_ADAPTERS,
    "expand_kernel": _OF_ADAPTERS,
    "recurrence_kernel": dict.fromkeys(("decay", "key", "value", "query", "rate", "out"), torch.float32),
}
_STRIDE = re.compile(r"(\w+?)_(?:(expert)_)?stride(?:_(sequence|token))?")


VARIANTS: set[tuple[Any, ...]] = set()  # the code of kernels that launches so far need, each compiled once


class Kernel:
    """Checks the arguments of a kernel, counts its launches, and computes nothing."""

    def __init__(self, kernel: Any, dtype: torch.dtype, launches: Counter[str]) -> None:
        self._name = kernel.fn.__name__
        self._parameters = list(inspect.signature(kernel.fn).parameters)
        self._dtype = dtype
        self._launches = launches
        self._not_specialized = kernel.kwargs.get("do_not_specialize") or ()
        self._of_any_alignment = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
        self._grid: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        assert all(type(size) is int and size > 0 for size in grid), f"{self._name}: its grid is {grid}"
        assert all(size < 2**16 for size in grid[1:]), f"{self._name}: its grid is {grid}"
        self._grid = grid
        return self

    def __call__(self, *args: Any, **constants: Any) -> None:
        self._launches[self._name] += 1
        numbers = {name: one for name, one in zip(self._parameters, args, strict=False) if type(one) is int}
        # As Triton does: numbers that are 1, and those that are multiples of 16, have code of their own.
        numbers = {name: min(one, 2) if one % 16 else 16 for name, one in numbers.items()}
        special = {name: one for name, one in numbers.items() if name not in self._not_specialized}
        # So have tensors that begin at a multiple of 16 bytes.
        aligned = {
            name: one.storage_offset() * one.itemsize % 16 == 0
            for name, one in zip(self._parameters, args, strict=False)
            if isinstance(one, Tensor) and name not in self._of_any_alignment
        }
        VARIANTS.add((self._name, *sorted({**constants, **special, **aligned}.items())))
        arguments = dict(zip(self._parameters, args, strict=False)) | constants
        missing = [name for name in self._parameters if name not in arguments]
        assert not missing, f"{self._name}: no {missing}"
        assert len(args) + len(constants) == len(arguments), f"{self._name}: an argument comes twice"
        unknown = set(arguments) - {*self._parameters, "num_warps", "num_stages"}
        assert not unknown, f"{self._name}: it has no {unknown}"
        for name, argument in arguments.items():
            if isinstance(argument, Tensor):
                self._check_tensor(name, argument, arguments)
            elif (match := _STRIDE.fullmatch(name)) is not None:
                self._check_stride(match, argument, arguments)

    def _check_tensor(self, name: str, tensor: Tensor, arguments: dict[str, Any]) -> None:
        what = f"{self._name}: {name} {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        assert tensor.device == GPU, what
        if name in OWN_DTYPES.get(self._name, ()):
            assert tensor.dtype == OWN_DTYPES[self._name][name], what
            assert tensor.stride(-1) == 1, what
        elif name in IN_MODEL_DTYPE:
            assert tensor.dtype == self._dtype, what
            assert tensor[0].is_contiguous(), f"{what} has strides {tensor.stride()}"
        elif name in CONTIGUOUS:
            assert tensor.is_contiguous(), what
        elif name in READ_IF and READ_IF[name][0] in arguments:
            constant, dtype = READ_IF[name]
            assert not arguments[constant] or (tensor.dtype == dtype and tensor.is_contiguous()), what
        elif name in DTYPES:
            assert tensor.dtype == DTYPES[name], what
            assert tensor.stride(-1) == 1, what

    def _check_stride(self, match: re.Match[str], stride: int, arguments: dict[str, Any]) -> None:
        name, of_experts, dimension = match.groups()
        tensor = arguments.get({"table": "block_tables", "groups": "scales"}.get(name, name))
        if not isinstance(tensor, Tensor) or name in ("scales", "groups", "state"):
            return
        tokens = tensor.dim() - 3
        place = {"sequence": 0, "token": tokens}
        if name == "codes":
            expected = tensor.stride(0 if of_experts else tensor.dim() - 2)
        else:
            expected = tensor.stride(place[dimension] if dimension else 0)
        assert stride == expected, f"{self._name}: {match[0]} is {stride}, and the tensor's is {expected}"


def replace_kernels(patch: pytest.MonkeyPatch, modules: list[ModuleType], dtype: torch.dtype) -> Counter[str]:
    """Replace the kernels that these modules launch, for models of this dtype, and return the count of launches."""
    launches = Counter[str]()
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            patch.setattr(module, name, Kernel(getattr(module, name), dtype, launches))
        if hasattr(module, "num_multiprocessors"):
            patch.setattr(module, "num_multiprocessors", lambda device: 132)
    return launches
