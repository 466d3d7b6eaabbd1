"""The native activations and norms equal those of torch."""

import ctypes
import math
import re
import subprocess

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, softplus

from oaiserve.engine.decoder.description import ClampedGate
from oaiserve.engine.executors.native import build
from oaiserve.engine.executors.native.library import ACTIVATIONS, Gating, Normalize, structure
from oaiserve.engine.model.layer_operations import ACTIVATIONS as IN_TORCH

pytestmark = pytest.mark.compiler
NAN = math.nan
INFINITY = math.inf
# Many values where the functions are curved, few up to where they overflow, and then special values.
X = torch.cat(
    [
        torch.linspace(-12, 12, 4000),
        torch.linspace(-300, 300, 1188),
        torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 1e30, -1e30, 88.4, 88.6, 88.8, NAN]),
    ]
)


def run(function: ctypes._CFuncPtr, *arguments: object, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    function(*arguments, ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_long(len(x)))
    return out


# Those of gates are not among the activations of MLPs.
REFERENCES = {"none": lambda x: x, "sigmoid": torch.sigmoid, **IN_TORCH}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_torch(exports: ctypes.CDLL, name: str) -> None:
    out = run(exports.run_activate, ctypes.c_int64(ACTIVATIONS.index(name)), x=X)
    torch.testing.assert_close(out, REFERENCES[name](X), rtol=3e-6, atol=2e-6, equal_nan=True)


INLINED = {
    *("load", "load_lanes", "store", "store_lanes"),
    *("exp", "exp2_of_negative", "log", "erf", "sigmoid", "tanh", "softplus", "activate"),
}


def test_functions_of_sixteen_values_are_never_called() -> None:
    symbols = subprocess.run(
        ["nm", "--demangle", build.build(torch.bfloat16)], capture_output=True, text=True, check=True
    ).stdout
    functions = set(re.findall(r"oaiserve::(\w+)[(<]", symbols))
    assert "OperationOf" in functions
    assert not functions & INLINED


def test_activations_of_infinity_are_their_limits(exports: ctypes.CDLL) -> None:
    x = torch.tensor([INFINITY, 1.0] * 8)
    for index, name in enumerate(ACTIVATIONS):
        expected = 1.0 if name == "sigmoid" else INFINITY
        assert run(exports.run_activate, ctypes.c_int64(index), x=x)[0] == expected, name


def test_the_clamped_gate_equals_torch_and_keeps_nan(exports: ctypes.CDLL) -> None:
    gate, up = torch.cartesian_prod(
        torch.cat([X[-1:], X[::13]]), torch.tensor([-1e30, -8.0, -7.0, -0.3, 0.0, 2.5, 7.1, NAN])
    ).unbind(-1)
    gate, up = (x[: len(x) // 16 * 16].contiguous() for x in (gate, up))
    gating = structure(Gating)(ACTIVATIONS.index("none"), 1.702, 7.0)
    out = torch.empty_like(gate)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (gate, up, out)]
    exports.run_gating(ctypes.byref(gating), *pointers, ctypes.c_long(len(out)))
    torch.testing.assert_close(out, ClampedGate(1.702, 7.0)(gate, up), rtol=3e-6, atol=2e-6, equal_nan=True)
    assert gate.isnan().any()
    assert (out.isnan() == (gate.isnan() | up.isnan())).all()


def test_tanh_equals_torch(exports: ctypes.CDLL) -> None:
    torch.testing.assert_close(run(exports.run_tanh, x=X), X.tanh(), rtol=0, atol=2e-7, equal_nan=True)


def test_softplus_equals_torch_relative_to_small_results_too(exports: ctypes.CDLL) -> None:
    expected = softplus(X.double()).float()
    torch.testing.assert_close(run(exports.run_softplus, x=X), expected, rtol=1e-6, atol=1e-37, equal_nan=True)


def normalized(exports: ctypes.CDLL, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, mean: bool) -> Tensor:
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (weight, bias)]
    norm = structure(Normalize)(*pointers, len(x), 1e-5, mean)
    out = torch.empty_like(x)
    out_bf16 = torch.empty_like(x, dtype=torch.bfloat16)
    for function, target in ((exports.run_normalize, out), (exports.run_normalize_to_bf16, out_bf16)):
        function(ctypes.byref(norm), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(target.data_ptr()))
    torch.testing.assert_close(out_bf16, out.bfloat16(), rtol=0, atol=0, equal_nan=True)
    return out


@pytest.mark.parametrize("width", [16, 48, 576, 4096])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norms_equal_torch(exports: ctypes.CDLL, width: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(width, generator=generator) for _ in range(3))
    x = (x + 3) * scale
    rms = rms_norm(x.double(), (width,), weight.double(), 1e-5).float()
    layer = layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5).float()
    without = layer_norm(x.double(), (width,), weight.double(), None, 1e-5).float()
    torch.testing.assert_close(normalized(exports, x, weight, None, mean=False), rms, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normalized(exports, x, weight, bias, mean=True), layer, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normalized(exports, x, weight, None, mean=True), without, rtol=1e-5, atol=1e-5)
    assert torch.equal(normalized(exports, x, None, None, mean=False), x)


def test_a_norm_of_nan_is_nan(exports: ctypes.CDLL) -> None:
    x = torch.ones(32)
    x[20] = NAN
    assert normalized(exports, x, torch.ones(32), None, mean=False).isnan().all()
