"""The C interface of the native code, as src/decoder.cpp defines it: its functions and structures."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_long, c_void_p
from typing import Any

import torch

from oaiserve.config import Quantize
from oaiserve.engine.model.cpu import build

# The order is that of `enum class Activation` in src/activation.h.
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2")


class Normalize(Structure):
    """A norm over `width` numbers. Without a weight, it copies them."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("width", c_long),
        ("epsilon", c_float),
        ("subtracts_mean", c_bool),
    )


class Rotary(Structure):
    """A rotary position embedding of queries and keys. Without cosines, nothing is rotated."""

    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("dim", c_long), ("interleaved", c_bool))


class StepInput(Structure):
    """The input of a step, and where its logits go; src/step.h has the types and shapes of its arrays."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("table_width", c_int64),
        ("num_logits", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_rows", c_void_p),
        ("logits", c_void_p),
    )


class PagedCache(Structure):
    """The KV cache of one layer; src/attention.h describes the layout of its keys and values."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_heads", c_long),
        ("key_dim", c_long),
        ("value_dim", c_long),
        ("block_size", c_long),
    )


class AttentionOptions(Structure):
    """The options of a layer's attention. A window or softcap of 0, or a null pointer, means that it has none."""

    _fields_ = (
        ("heads", c_long),
        ("scaling", c_float),
        ("window", c_long),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
    )


_POINTER, _DECODER, _ATTENTION = c_void_p, c_void_p, c_void_p
_INDEX = c_long  # of a part of the decoder; as a result, -1 if there is no memory for the part
# The types of each function's arguments and of its result.
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "pool": ((c_int,), _POINTER),
    "free_pool": ((_POINTER,), None),
    "decoder": ((), _DECODER),
    "free_decoder": ((_DECODER,), None),
    "add_floats": ((_DECODER, c_long), _INDEX),
    "add_elements": ((_DECODER, c_long), _INDEX),
    "add_weights": ((_DECODER, _POINTER, c_long, c_long, _POINTER), _INDEX),
    "add_gated_weights": ((_DECODER, _POINTER, _POINTER, c_long, c_long), _INDEX),
    "add_cache": ((_DECODER, _POINTER, _POINTER, c_long, c_long, c_long, c_long), _INDEX),
    "embed": ((_DECODER, _INDEX, _POINTER, _POINTER, c_long, c_float), _INDEX),
    "norm": ((_DECODER, _INDEX, _INDEX, Normalize, c_bool), _INDEX),
    "add_norm": ((_DECODER, _INDEX, _INDEX, Normalize, c_float), _INDEX),
    "project": ((_DECODER, _INDEX, _INDEX, _INDEX, c_bool, c_float), _INDEX),
    "activate": ((_DECODER, _INDEX, _INDEX, _INDEX, c_int64), _INDEX),
    "gate": ((_DECODER, _INDEX, _INDEX, _INDEX, c_int64), _INDEX),
    "prepare": ((_DECODER, _INDEX, _INDEX, _INDEX, c_long, Rotary, Normalize, Normalize), _INDEX),
    "attend": ((_DECODER, _INDEX, _INDEX, _INDEX, c_long, c_float, c_long, c_float), _INDEX),
    "logits": ((_DECODER, _INDEX, _INDEX, c_float, c_float), _INDEX),
    "durations": ((_DECODER, _POINTER), None),
    "step": ((_DECODER, _POINTER, POINTER(StepInput)), c_int),
    "attention": ((c_int, _POINTER), _ATTENTION),
    "free_attention": ((_ATTENTION,), None),
    "attention_step": ((_ATTENTION, POINTER(StepInput)), c_int),
    "attention_layer": ((_ATTENTION, PagedCache, AttentionOptions, *(_POINTER,) * 4), c_int),
}


class Library:
    """The functions of the native code, as methods without the prefix `oaiserve_`. A call releases the GIL.

    The functions that add a part to a decoder raise MemoryError. The others return null or -1, which the caller checks.
    """

    def __init__(self, dtype: torch.dtype, quantize: Quantize = "none", *, native_build: bool = False) -> None:
        """Load the library as `build.load` does. Raises BuildError."""
        loaded = build.load(dtype, quantize, native_build=native_build)
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(loaded, f"oaiserve_{name}")
            function.argtypes, function.restype = arguments, result
            if result is _INDEX:
                function.errcheck = _raise_if_negative
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the functions are set above
        raise AttributeError(name)


def _raise_if_negative(index: int, function: Any, _: object) -> int:
    if index < 0:
        raise MemoryError(f"{function.__name__} found no memory for a part of the decoder.")
    return index
