"""The C interface of the native code, as src/decoder.cpp defines it: a table of its functions, and their structures.

The arguments of operations are dataclasses with the same fields as C structures, and are converted to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import POINTER, Structure, addressof, c_bool, c_char_p, c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Norm, Router
from oaiserve.engine.decoder.grids import IN_NATIVE_CODE, points_of
from oaiserve.engine.executors.native import build
from oaiserve.engine.executors.native.kv_layout import LANES

# Must be in the order of `enum class Activation` in src/activation.h.
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
NONE = -1  # no adapter site, no buffer, or no numbers of a row

MOST_EXPERTS = 1024  # limit of a layer's experts; must match src/experts.h


@dataclass(frozen=True, slots=True)
class Normalize:
    """A norm over `width` numbers. Without a weight, it copies them."""

    weight: Tensor | None
    bias: Tensor | None
    width: int
    epsilon: float
    subtracts_mean: bool

    @classmethod
    def of(cls, norm: Norm | None, width: int = 0) -> Normalize:
        """Return the norm for a norm of the description. Without one, `width` numbers are copied."""
        if norm is None:
            return cls(None, None, width, 0.0, False)
        bias = None if norm.bias is None else _whole(norm.bias)
        return cls(_whole(norm.weight), bias, len(norm.weight), norm.epsilon, norm.subtracts_mean)


def _whole(numbers: Tensor) -> Tensor:
    """Pad the numbers with zeros, because native code reads LANES at a time."""
    if rest := -len(numbers) % LANES:
        return torch.nn.functional.pad(numbers, (0, rest))
    return numbers


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary position embedding for queries and keys. Without cosines, nothing is rotated."""

    cosines: Tensor | None
    sines: Tensor | None
    offset: int
    pairs: int
    apart: int
    interleaved: bool
    before_norms: bool
    query_factors: Tensor | None
    axes: Tensor | None = None  # int32


@dataclass(frozen=True, slots=True)
class Gating:
    """How an expert combines its gate and its up projection. Must match the struct in src/experts.h."""

    activation: str
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts. Must match the struct in src/experts.h."""

    experts: int
    top_k: int
    groups: int
    top_groups: int
    bias: Tensor | None
    factors: Tensor | None
    scale: float
    is_sigmoid: bool
    adds_best_two: bool
    renormalizes: bool

    @classmethod
    def of(cls, router: Router) -> Routing:
        own = {field.name: getattr(router, field.name) for field in fields(cls) if field.name != "experts"}
        return cls(experts=len(router.weight), **own)


@dataclass(frozen=True, slots=True)
class ConvolvedChannels:
    """A convolution of the first numbers of a row. Must match the struct in src/states.h."""

    channels: int
    taps: int
    weight: Tensor
    bias: Tensor | None
    activation: str
    before: int
    after: int
    layer: int


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a gated delta net. Must match the struct in src/delta.h."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    first_decay: int
    fades_by_row: bool
    rate_factor: float


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """The heads of a Mamba 2 mixer. Must match the struct in src/mamba.h."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    times: int
    least_time: float
    most_time: float


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of consecutive experts, and the assignment that gives each expert its rows."""

    first: int
    assignment: int


@dataclass(frozen=True, slots=True)
class WeightRange:
    """Consecutive weights in blocks that read the same input."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """The gates and the norm of a row. Must match the struct in src/gates.h."""

    x: int
    gates: int
    groups: int
    activation: str
    gates_first: bool = False
    own_weights: bool = False


# The C types of fields, keyed by annotation. Integers in operations are sizes, or indices of parts of the decoder.
_C_TYPES: dict[str, Any] = {
    "int": c_long,
    "float": c_float,
    "bool": c_bool,
    "str": c_int64,  # one of ACTIVATIONS
    "Tensor": c_void_p,
    "Tensor | None": c_void_p,
}


@cache
def structure(kind: type) -> type[Structure]:
    """Return the C structure with the fields of a dataclass, in the same order."""
    types = {field.name: str(field.type) for field in fields(kind)}
    c_fields = [(name, _C_TYPES.get(of_field) or structure(globals()[of_field])) for name, of_field in types.items()]
    return type(kind.__name__, (Structure,), {"_fields_": c_fields})


def _c_type(kind: Any) -> Any:
    has_fields = is_dataclass(kind)  # a variable, because mypy has no type for a dataclass that is hashable
    if has_fields:
        return structure(kind)
    return kind


def argument(value: Any, keep: Callable[[Tensor], int | None]) -> Any:
    """Convert a value for C: a dataclass to a structure, an activation to its number, a tensor to its address.

    `keep` returns the address.
    """
    if isinstance(value, Tensor):
        return keep(value)
    if isinstance(value, str):
        return ACTIVATIONS.index(value)
    if is_dataclass(value):
        return _c_type(type(value))(*(argument(getattr(value, field.name), keep) for field in fields(value)))
    return value


def place_of(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor, or a null pointer for None."""
    return None if tensor is None else tensor.data_ptr()


class StepInput(Structure):
    """The input of a step, and the address for its logits; src/step.h has the types and shapes of its arrays."""

    _SIZES = ("num_tokens", "num_sequences", "table_width", "num_logits")
    _ARRAYS = ("token_ids", "positions", "slots", "query_start", "seq_lens", "block_tables", "logits_rows", "logits")
    _OF_SOME_MODELS = ("adapters", "token_adapters", "state_places", "states")
    _fields_ = (
        *((name, c_int64) for name in _SIZES),
        *((name, c_void_p) for name in _ARRAYS),
        ("num_adapters", c_int64),
        *((name, c_void_p) for name in _OF_SOME_MODELS),
        *((name, c_int64) for name in ("num_vectors", "num_sets")),
        *((name, c_void_p) for name in ("vectors", "vector_rows", "axes", "last_visible")),
    )


class CacheMemory(Structure):
    """The KV cache of one layer; src/paged_cache.h describes the layout of its keys and values."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_heads", c_long),
        ("key_dim", c_long),
        ("value_dim", c_long),
        ("block_size", c_long),
        ("is_int8", c_bool),
        ("key_sizes", c_void_p),
    )


class AttentionOptions(Structure):
    """The options of a layer's attention. A window or softcap of 0, or a null pointer, turns the option off."""

    _fields_ = (
        ("heads", c_long),
        ("scaling", c_float),
        ("window", c_long),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("looks_ahead", c_bool),
    )


_POINTER = c_void_p
_DECODER = c_void_p
_ADAPTER = c_void_p
_INDEX = c_long  # index of a part of the decoder; as a result, -1 means that there is no memory for the part
# The argument types and the result type of each function. A dataclass represents a structure.
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "pool": ((c_int,), _POINTER),
    "free_pool": ((_POINTER,), None),
    "decoder": ((), _DECODER),
    "free_decoder": ((_DECODER,), None),
    "lend_memory": ((_DECODER, _POINTER, c_long), None),
    "lent_bytes": ((_DECODER,), c_int64),
    "add_floats": ((_DECODER, c_long, c_long), _INDEX),
    "add_elements": ((_DECODER, c_long, c_long), _INDEX),
    "add_weights": ((_DECODER, _POINTER, c_long, c_long, _POINTER), _INDEX),
    "add_gated_weights": ((_DECODER, _POINTER, _POINTER, c_long, c_long, _POINTER), _INDEX),
    "add_router": ((_DECODER, _POINTER, c_long, c_long, _POINTER), _INDEX),
    "add_assignment": ((_DECODER, c_long, c_long), _INDEX),
    "add_cache": ((_DECODER, CacheMemory), _INDEX),
    "add_plan": ((_DECODER, c_long, _INDEX, c_long, c_bool), _INDEX),
    "add_site": ((_DECODER,), _INDEX),
    "arguments": ((c_char_p,), c_char_p),
    "add_operation": ((_DECODER, c_char_p, POINTER(c_void_p)), _INDEX),
    "adapter": ((c_long,), _ADAPTER),
    "free_adapter": ((_ADAPTER,), None),
    "set_adapter": ((_ADAPTER, _INDEX, c_long, c_long, _POINTER, _POINTER, c_long, *(_POINTER,) * 3), c_int),
    "durations": ((_DECODER, _POINTER), None),
    "step": ((_DECODER, _POINTER, POINTER(StepInput)), c_int),
    # For weights in the blocks of GGUF files:
    "has_integer_tiles": ((), c_bool),
    "add_groups": ((_DECODER, c_long, c_long), _INDEX),
    "set_grid": ((c_int, _POINTER), None),
    "add_blocks": ((_DECODER, *(_POINTER,) * 3, c_long, c_long, _POINTER), _INDEX),
    "drop_after": ((_DECODER, _POINTER, c_long), _INDEX),
    "pack": ((_DECODER, _POINTER), None),
    "expand_row": ((_DECODER, _INDEX, c_long, _POINTER), None),
    "encode_blocks": ((_POINTER, _POINTER, c_long, c_long, c_int, _POINTER), None),
}
# The types of an operation's arguments, keyed by the letters that KIND in src/decoder.cpp uses.
_KINDS: dict[str, Any] = {"f": c_float, "b": c_bool, "i": c_int64, "p": c_void_p}


class Library:
    """The functions of the native code, as methods without the prefix `oaiserve_`. A call releases the GIL.

    The functions that add a part to a decoder raise MemoryError. The others return null or -1, which the caller checks.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Load the library as `build.load` does. Raises BuildError."""
        loaded = build.load(dtype)
        self.dtype = dtype
        self.name = Path(loaded._name).name  # The name includes a hash of sources, compiler and CPU, see `build`.
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(loaded, f"oaiserve_{name}")
            function.argtypes = [_c_type(kind) for kind in arguments]
            function.restype = result
            if result is _INDEX:
                function.errcheck = _raise_if_negative
            setattr(self, name, function)

    def add(self, decoder: int, operation: str, *arguments: Any, keep: Callable[[Tensor], int | None]) -> None:
        """Add an operation to a decoder. `keep` returns the address of a tensor, and keeps the tensor alive.

        Raises MemoryError, and ValueError for a wrong number of arguments.
        """
        kinds = self.arguments(operation.encode()).decode()
        values = [argument(value, keep) for value in arguments]
        own = [value if kind == "s" else _KINDS[kind](value) for kind, value in zip(kinds, values, strict=True)]
        self.add_operation(decoder, operation.encode(), (c_void_p * len(own))(*map(addressof, own)))

    def set_grids(self, kinds: Iterable[int]) -> None:
        """Pass the points of those formats whose codes are indices into a table. Packed weights need them."""
        for kind in IN_NATIVE_CODE.keys() & set(kinds):
            self.set_grid(kind, points_of(kind).ctypes.data)

    def __getattr__(self, name: str) -> Any:  # Only for type checkers; the functions are set above.
        raise AttributeError(name)


def _raise_if_negative(index: int, function: Any, _: object) -> int:
    if index < 0:
        raise MemoryError(f"{function.__name__} found no memory for a part of the decoder.")
    return index
