"""The native code is compiled once for each set of inputs, and never left half written. The compilers are scripts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from oaiserve.engine.model.cpu import build
from oaiserve.engine.model.cpu.build import BuildError

Compiler = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Return a function that makes a script the compiler, and an empty cache for its libraries.

    The last argument of the script, `$out`, is the file to write. calls.txt gets the arguments of each call.
    """
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))

    def write(script: str) -> Path:
        path = tmp_path / "fake-g++"
        path.write_text(
            f'#!/bin/sh\nfor out; do :; done\nif [ "$out" = --version ]; then echo fake 1.0; exit; fi\n'
            f'echo "$@" >> {tmp_path}/calls.txt\n{script}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return tmp_path

    return write


def test_a_library_is_compiled_once_for_each_dtype(compiler: Compiler) -> None:
    folder = compiler('echo made > "$out"')
    path = build.build(torch.float32)
    assert path == build.library_path(torch.float32) == build.build(torch.float32)
    assert path.read_text() == "made\n"
    assert path.is_relative_to(folder / "cache")
    other = build.build(torch.bfloat16)
    calls = (folder / "calls.txt").read_text().splitlines()
    assert [("-DELEMENT=float" in call, "-DELEMENT=bf16" in call) for call in calls] == [(True, False), (False, True)]
    assert sorted(path.parent.iterdir()) == sorted([path, other]), "no other files are left"


def test_the_compiler_may_have_arguments(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiler('echo made > "$out"')
    alone = build.library_path(torch.float32)
    monkeypatch.setenv("CXX", f"'{folder}/fake-g++' --first 'with space'")
    assert build.build(torch.float32) != alone
    assert (folder / "calls.txt").read_text().startswith("--first with space ")


def test_an_unsupported_dtype_is_refused(compiler: Compiler) -> None:
    compiler("")
    with pytest.raises(BuildError, match="the native step supports bfloat16 and float32, not float16"):
        build.library_path(torch.float16)


def test_the_name_depends_on_sources_flags_cpu_and_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("")
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    names = [build.library_path(torch.float32)]
    with (sources / "simd.h").open("a") as header:
        header.write("// more\n")
    names.append(build.library_path(torch.float32))
    (sources / "simd.h").rename(sources / "vectors.h")
    names.append(build.library_path(torch.float32))
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"])
    names.append(build.library_path(torch.float32))
    monkeypatch.setattr(build, "_cpu_features", lambda: "flags: avx2")
    names.append(build.library_path(torch.float32))
    script = tmp_path / "fake-g++"
    script.write_text(script.read_text().replace("fake 1.0", "fake 2.0"))
    names.append(build.library_path(torch.float32))
    assert len(set(names)) == 6
    assert build.library_path(torch.float32) == names[-1]


def test_the_name_depends_on_the_features_of_the_cpu_but_not_on_its_clock(tmp_path: Path) -> None:
    def features(mhz: int, flags: str) -> str:
        path = tmp_path / "cpuinfo"
        core = f"model name\t: A\nflags\t\t: {flags}\ncpu MHz\t\t: {mhz}\n\n"
        path.write_text(core + core.replace(str(mhz), "1"))
        return build._cpu_features(path)

    assert features(2000, "sse avx") == features(3000, "sse avx")
    assert features(2000, "sse avx") != features(2000, "sse avx avx512f")
    assert build._cpu_features(tmp_path / "none") == torch.backends.cpu.get_cpu_capability()


def test_two_builds_at_once_both_get_a_complete_library(compiler: Compiler) -> None:
    # Each compiler waits until both have begun to write.
    folder = compiler('echo ma > "$out"; touch $0.$$; until [ $(ls $0.* | wc -l) = 2 ]; do :; done; echo de >> "$out"')
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(build.build, [torch.float32] * 2))
    assert paths == [build.library_path(torch.float32)] * 2
    assert paths[0].read_text() == "ma\nde\n"
    assert list(paths[0].parent.iterdir()) == paths[:1]
    assert len((folder / "calls.txt").read_text().splitlines()) == 2


def test_the_first_error_of_the_compiler_is_reported_and_no_file_is_left(compiler: Compiler) -> None:
    folder = compiler('echo half > "$out"; echo "In file a.h:\na.h:1: error: no such thing\nerror: too" >&2; exit 1')
    with pytest.raises(BuildError, match=r"fake-g\+\+ failed: a.h:1: error: no such thing$"):
        build.build(torch.float32)
    assert list((folder / "cache" / "native").iterdir()) == []
    compiler("exit 1")
    with pytest.raises(BuildError, match="failed: no message"):
        build.build(torch.float32)


def test_a_missing_compiler_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"^the compiler g\+\+-99 that CXX names was not found$"):
        build.library_path(torch.float32)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler was found \(install g\+\+\)$"):
        build.library_path(torch.float32)


def test_a_compiler_that_cannot_run_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_program = tmp_path / "g++"
    no_program.write_bytes(b"\x7fELF?")
    no_program.chmod(0o755)
    monkeypatch.setenv("CXX", str(no_program))
    with pytest.raises(BuildError, match="cannot be run: Exec format error"):
        build.library_path(torch.float32)


def test_a_cache_that_cannot_be_written_is_named_in_the_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiler('echo made > "$out"')
    (folder / "file").touch()
    monkeypatch.setenv("OAISERVE_CACHE", str(folder / "file"))
    with pytest.raises(BuildError, match="file/native cannot be written: Not a directory"):
        build.build(torch.float32)


def test_a_library_that_cannot_be_loaded_is_named_in_the_error(compiler: Compiler) -> None:
    compiler('echo made > "$out"')
    with pytest.raises(BuildError, match=r"float-[0-9a-f]{16}\.so cannot be loaded: "):
        build.load(torch.float32)
