"""Code with AMX: the emulator computes what Intel's manual says, and the compiler makes the instructions of AMX.

That models compute the same with it is in test_native_batches.py, and that their numbers do not depend on their company
in test_same_numbers.py.
"""

import ctypes
import logging
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oaiserve.engine.executors.native import build, prebuilt, variants
from tests.engine.executors.native.compiled import HERE, CompilerError, compiled
from tests.engine.executors.native.small_models import EMULATED_AMX, compiled_for

pytestmark = pytest.mark.kernels

LEAST_NORMAL = 2.0**-126
WITH_AMX = frozenset({"avx512f", "amx_tile", "amx_bf16", "amx_int8"})


@pytest.fixture(scope="module")
def emulated() -> ctypes.CDLL:
    with compiled_for(EMULATED_AMX):
        return exports(build.FLAGS)


def exports(flags: list[str]) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled("g++", flags, HERE / "amx_exports.cpp")))


def add_products(library: ctypes.CDLL, a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """Return sums [16, 16] + a [16, 32] @ b [32, 16], as one instruction adds them."""
    pairs = b.unflatten(0, (16, 2)).transpose(1, 2).contiguous()
    out = sums.clone()
    library.add_products_of_tiles(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, pairs, out)))
    return out


def add_integer_products(library: ctypes.CDLL, a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """Return sums [16, 16] + a [16, 32] @ b [32, 16] in integers, as one instruction adds them."""
    out = sums.clone()
    fours = b.unflatten(0, (8, 4)).transpose(1, 2).contiguous()
    x, y, z = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, fours, out))
    library.add_products_of_integer_tiles(x, y, ctypes.c_bool(b.dtype == torch.int8), z)
    return out


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < LEAST_NORMAL, np.float32(0), x.astype(np.float32))


def expected_sums(a: Tensor, b: Tensor, sums: Tensor) -> np.ndarray:
    """Return the sums by the manual: FMAs over elements with even and odd indices apart, then two additions."""
    x, y = (flushed(tensor.float().numpy()).astype(np.float64) for tensor in (a, b))
    halves = []
    for first in (0, 1):
        half = np.zeros((16, 16), np.float32)
        for k in range(first, 32, 2):
            half = flushed((x[:, k, None] * y[k] + half).astype(np.float32))  # float64 has each of these sums exactly
        halves.append(half)
    return flushed(flushed(sums.numpy()) + flushed(halves[0] + halves[1]))


@pytest.mark.compiler
@pytest.mark.parametrize("scale", [1.0, 2.0**-64, 2.0**-100])  # products are normal, around the least normal, and zero
def test_the_emulator_adds_and_rounds_in_the_order_of_the_manual(emulated: ctypes.CDLL, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator) * scale for shape in ((16, 32), (32, 16)))
    sums = torch.randn(16, 16, generator=generator) * scale**2
    a = a.bfloat16()
    b = b.bfloat16()
    a[3, 5] = 1e-39  # counts as zero
    result = add_products(emulated, a, b, sums)
    np.testing.assert_array_equal(result.numpy(), expected_sums(a, b, sums))
    if scale == 1:
        in_one_order = sums + a.float() @ b.float()
        assert not torch.equal(result, in_one_order)
        torch.testing.assert_close(result, in_one_order)


@pytest.mark.compiler
def test_a_cpu_with_amx_adds_and_rounds_as_the_emulator_does(emulated: ctypes.CDLL) -> None:
    if not prebuilt.usable_features() >= variants.AMX_FEATURES:
        # Only a CPU with AMX (Intel's since Sapphire Rapids) can say what its instructions give. For all others the
        # emulator is compared with Intel's manual, above, and everything else with the emulator.
        pytest.skip("this CPU has no AMX, or its system does not allow it: run it on a Sapphire Rapids")
    real = exports([*build.FLAGS, variants.AMX_FLAG])
    generator = torch.Generator().manual_seed(2)
    for scale in (1.0, 2.0**-64, 2.0**-100):
        a, b = ((torch.randn(shape, generator=generator) * scale).bfloat16() for shape in ((16, 32), (32, 16)))
        sums = torch.randn(16, 16, generator=generator) * scale**2
        assert torch.equal(add_products(real, a, b, sums), add_products(emulated, a, b, sums))
    for of_b in (torch.int8, torch.uint8):
        integers = random_integers(of_b)
        assert torch.equal(add_integer_products(real, *integers), add_integer_products(emulated, *integers))


@pytest.fixture(scope="module", params=["emulated", "real"])
def amx(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param == "emulated":
        library: ctypes.CDLL = request.getfixturevalue("emulated")
        return library
    if not prebuilt.usable_features() >= variants.AMX_FEATURES:
        pytest.skip("this CPU has no AMX, or its system does not allow it: run it on a Sapphire Rapids")
    return exports([*build.FLAGS, variants.AMX_FLAG])


@pytest.mark.compiler
@pytest.mark.parametrize("scale", [1.0, 2.0**-63])  # products are normal, and around the least normal
@pytest.mark.parametrize("dim", [64, 48, 16, 176])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_attention_of_few_rows_has_the_bits_of_tiles(amx: ctypes.CDLL, rows: int, dim: int, scale: float) -> None:
    panels = 7
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(32, max(dim, 16 * panels), generator=generator) * scale).bfloat16()
    cache = (torch.randn(panels * 16 * dim, generator=generator) * scale).bfloat16()
    cache[::97] = 1e-39  # counts as zero
    for function, columns, width in ((amx.score, dim, 16 * panels), (amx.weigh_values, 16 * panels, dim)):
        own = x[:, :columns].contiguous()
        results = []
        for in_tiles, count in ((True, 32), (True, 20), (True, 9), (True, rows), (False, rows)):
            out = torch.full((32, width), torch.nan)
            addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (own, cache))
            sizes = (ctypes.c_long(size) for size in (count, panels, dim))
            function(ctypes.c_bool(in_tiles), *addresses, *sizes, ctypes.c_void_p(out.data_ptr()))
            assert out[:count].isfinite().all()
            results.append(out[:rows])
        assert all(torch.equal(result, results[0]) for result in results)
        if scale == 1.0 and function is amx.score:
            keys = cache.view(panels, dim // 2, 16, 2).transpose(1, 2).reshape(panels * 16, dim).float()
            torch.testing.assert_close(results[0], own[:rows].float() @ keys.T)


def random_integers(of_b: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-128, 128, shape, generator=generator) for shape in ((16, 32), (32, 16)))
    return a.to(torch.int8), b.to(of_b), torch.randint(-(2**31), 2**31, (16, 16), generator=generator).to(torch.int32)


@pytest.mark.compiler
@pytest.mark.parametrize("of_b", [torch.int8, torch.uint8])
def test_the_emulator_adds_products_of_integers(emulated: ctypes.CDLL, of_b: torch.dtype) -> None:
    a, b, sums = random_integers(of_b)
    expected = (sums.long() + a.long() @ b.long() + 2**31) % 2**32 - 2**31  # an overflow wraps around
    assert torch.equal(add_integer_products(emulated, a, b, sums).long(), expected)


@pytest.mark.compiler
def test_the_compiler_makes_the_instructions_of_amx(tmp_path: Path) -> None:
    (variant,) = (variant for variant in variants.VARIANTS if variant.features >= variants.AMX_FEATURES)
    source = tmp_path / "product.cpp"
    source.write_text(
        '#include "blocks.cpp"\nusing namespace oaiserve;\n'
        "void product(const Linear<bf16>& w, const bf16* x, float* out) {\n"
        "  linear_item(w, x, 64, 40, 1, 0, [&](long, long column, f32x16 v) { store(out + column, v); });\n}\n"
        "void blocks(const BlockLinear& w, const RowLine* x, float* out) {\n"
        "  linear_item(w, x, 64, 40, 1, 0, [&](long, long column, f32x16 v) { store(out + column, v); });\n}\n"
    )
    try:
        assembly = compiled("g++", [*variants.FLAGS, *variant.flags, "-O1", "-S"], source)
    except CompilerError as error:
        if "unrecognized" not in str(error):
            raise
        # g++ knows AMX since version 11, on x86-64 only. An older one makes none of its code for anyone, and no wheel
        # for x86-64: `make wheel` fails with its message.
        pytest.skip("this g++ has no AMX: version 11 has it, for x86-64")
    result = Counter(re.findall(r"^\s+(\w+)", assembly.read_text(), re.MULTILINE))
    assert result.keys() >= {"ldtilecfg", "tileloadd", "tileloaddt1", "tilestored", "tilerelease"}
    assert result.keys() >= {"tdpbf16ps", "tdpbssd", "tdpbsud"}
    assert not result["vdpbf16ps"], "a row that does not go through tiles would be summed in another order"


# -- whether it may be used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_use_tiles", [True, False])
def test_a_cpu_has_amx_only_if_the_system_allows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_use_tiles: bool
) -> None:
    monkeypatch.setattr(prebuilt, "_may_use_tiles", lambda: may_use_tiles)
    monkeypatch.delenv(prebuilt.LIMIT, raising=False)
    monkeypatch.setattr(prebuilt, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {' '.join(WITH_AMX)}\n")
    assert prebuilt.usable_features() == (WITH_AMX if may_use_tiles else {"avx512f"})
    for features, has_tiles in ((WITH_AMX, may_use_tiles), ({"avx512f", "amx_tile", "amx_bf16"}, False)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {' '.join(features)}\n")
        assert (variants.AMX_FLAG in build._flags("bf16")) == has_tiles


def test_a_system_that_refuses_the_registers_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(prebuilt, "_TILE_DATA", 63)  # a part of a thread's state that no CPU has
    monkeypatch.setattr(prebuilt, "_may_use_tiles", prebuilt._may_use_tiles.__wrapped__)  # without earlier answers
    monkeypatch.delenv(prebuilt.LIMIT, raising=False)
    monkeypatch.setattr(prebuilt, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {' '.join(WITH_AMX)}\n")
    caplog.set_level(logging.WARNING)
    assert prebuilt.usable_features() == {"avx512f"}
    (message,) = caplog.messages
    assert message.startswith("AMX is not used, because the system refuses its registers: ")
