"""The wheel's library that fits the CPU is used if it is sound and of the same sources. Else one is compiled."""

import logging
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from oaiserve.engine.executors.native import build, prebuilt, variants
from oaiserve.engine.executors.native.build import BuildError
from oaiserve.engine.executors.native.variants import VARIANTS

NAMES = {variant.name: variant for variant in VARIANTS}
V3 = "fpu vme sse sse2 ht pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm bmi1 avx2 bmi2"
V4 = f"{V3} avx_vnni avx512f avx512dq avx512cd avx512bw avx512vl"
ARM_DOT = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"  # as on Cortex-A76
LACKS_AVX2 = "The wheel has no native code for this CPU, which lacks avx2"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pretend that oaiserve was installed from a wheel: return its folder of libraries, which have no code.

    The CPU has AVX-512 but nothing for bfloat16, and there is no compiler.
    """
    folder = tmp_path / "lib"
    folder.mkdir()
    for variant in VARIANTS:
        for kind in variants.KINDS:
            path = folder / variants.library_name(kind, variant)
            path.write_text(f"code of {path.name}")
            variants.seal(path, variants.origin(kind, variant))
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(prebuilt, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    be_a_cpu_with(tmp_path, V4)
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(prebuilt.LIMIT, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    prebuilt.find.cache_clear()
    yield folder
    prebuilt.find.cache_clear()


def be_a_cpu_with(tmp_path: Path, features: str) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nflags\t\t: {features}\n\nprocessor\t: 1\nflags\t\t: {features}\n"
    )


def library(wheel: Path, kind: str, variant: str = "x86-64-v4") -> Path:
    return wheel / variants.library_name(kind, NAMES[variant])


# -- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", f"{V4} avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8", "x86-64-v4-bf16-amx"),
        ("x86_64", f"{V4} avx512_bf16 avx512_vnni amx_bf16 amx_tile", "x86-64-v4-bf16"),
        ("x86_64", f"{V4} avx512_vnni", "x86-64-v4-vnni"),  # Cascade Lake and Ice Lake
        ("x86_64", V4, "x86-64-v4"),
        ("x86_64", f"{V3} avx512f avx512_bf16", "x86-64-v3"),  # some of AVX-512 only
        ("x86_64", V3, "x86-64-v3"),
        ("x86_64", f"{V3} avx_vnni", "x86-64-v3-vnni"),
        ("aarch64", f"{ARM_DOT} sve i8mm bf16", "aarch64-i8mm-bf16"),
        ("aarch64", f"{ARM_DOT} bf16", "aarch64-dotprod"),
        ("aarch64", ARM_DOT, "aarch64-dotprod"),
        ("aarch64", "fp asimd evtstrm aes crc32 atomics bf16", "aarch64"),
    ],
)
def test_the_best_variant_whose_features_the_cpu_has_is_chosen(machine: str, features: str, expected: str) -> None:
    assert prebuilt.fitting(machine, frozenset(features.split())) == NAMES[expected]


@pytest.mark.parametrize(
    ("machine", "features", "reason"),
    [
        ("x86_64", V4.replace("avx2 ", "").replace("fma ", ""), f"{LACKS_AVX2}, fma"),
        ("riscv64", "", "The wheel has no native code for riscv64"),
    ],
)
def test_where_no_variant_fits_the_log_says_what_the_cpu_lacks(
    machine: str, features: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert prebuilt.fitting(machine, frozenset(features.split())) is None
    assert caplog.messages == [reason]


def test_no_cpu_that_can_run_a_variant_is_always_given_an_earlier_one() -> None:
    for better, worse in combinations(VARIANTS, 2):
        assert better.machine != worse.machine or not better.features <= worse.features


def test_a_feature_counts_if_all_cores_have_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: a b\nvmx flags\t: c\nbugs\t\t: d\n\nflags\t\t: b e\n")
    assert prebuilt.cpu_features(cpuinfo) == {"b"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert prebuilt.cpu_features(cpuinfo) == {"fp", "asimd"}
    cpuinfo.write_text("model name\t: A\n")
    assert prebuilt.cpu_features(cpuinfo) == prebuilt.cpu_features(tmp_path / "none") == frozenset()


def test_the_library_of_dtype_and_cpu_is_found(wheel: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    results = [build.library_path(dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert results == [library(wheel, name) for name in ("bf16", "float")]
    assert set(caplog.messages) == {"The native code is the wheel's for x86-64-v4"}
    assert build.is_built(torch.float32)


# -- whether it may be used -------------------------------------------------------------------------------------------


def of_other_sources(path: Path) -> str:
    variants.seal(path, b"what is sealed with another digest")
    return "is of other sources than these"


def of_another_variant(path: Path) -> str:
    path.write_bytes(library(path.parent, "float", "x86-64-v3").read_bytes())
    return "is of other sources than these"


def damaged(path: Path) -> str:
    path.write_bytes(b"x" + path.read_bytes()[1:])
    return "is damaged"


def cut(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return "is damaged"


def missing(path: Path) -> str:
    path.unlink()
    return "is missing: the wheel is not whole, or its native code is of other sources than these"


def in_the_way(path: Path) -> str:
    missing(path)
    path.mkdir()
    return "cannot be read: Is a directory"


@pytest.mark.parametrize("spoil", [of_other_sources, of_another_variant, damaged, cut, missing, in_the_way])
def test_a_library_that_does_not_match_is_refused_and_one_is_compiled(
    wheel: Path, compiler: Callable[[str], Path], caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    path = library(wheel, "float")
    reason = spoil(path)
    compiler('echo compiled > "$out"')
    assert not build.is_built(torch.float32)
    with pytest.raises(BuildError, match=r"/cache/native/float-[0-9a-f]{16}\.so cannot be loaded"):
        build.load(torch.float32)
    assert caplog.messages == [f"The wheel's native code is not used: {path} {reason}"], "once"


def test_the_origin_depends_on_sources_and_flags_and_so_does_the_name(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = variants.digest("-O3", sources=wheel)
    assert variants.digest("-O2", sources=wheel) != first
    next(wheel.iterdir()).write_text("int b;")
    assert variants.digest("-O3", sources=wheel) != first
    origins = {variants.origin(kind, variant) for kind in variants.KINDS for variant in VARIANTS}
    assert len(origins) == len(variants.KINDS) * len(VARIANTS)
    monkeypatch.setattr(variants, "FLAGS", [*variants.FLAGS, "-DNEW"])
    assert origins.isdisjoint(variants.origin(kind, variant) for kind in variants.KINDS for variant in VARIANTS)
    assert prebuilt.find("float") is None


def test_without_a_library_that_fits_and_without_a_compiler_both_are_said(
    wheel: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    be_a_cpu_with(tmp_path, V3.replace("avx2 ", ""))
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler was found \(install g\+\+\)$"):
        build.is_built(torch.float32)
    assert caplog.messages == [LACKS_AVX2]


def test_where_oaiserve_is_run_from_its_sources_nothing_is_said(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prebuilt, "FOLDER", wheel / "none")
    assert prebuilt.find("float") is None
    assert caplog.messages == []
