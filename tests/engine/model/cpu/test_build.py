"""The native code is compiled once for each set of inputs, and never left half written. The compilers are scripts."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
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


def code_of(path: Path) -> bytes:
    """Return what the compiler has written, which the digest follows."""
    content = path.read_bytes()
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()
    return content[:-32]


def num_calls(folder: Path) -> int:
    return len((folder / "calls.txt").read_text().splitlines())


def test_a_library_is_compiled_once_for_each_dtype(compiler: Compiler) -> None:
    folder = compiler('echo made > "$out"')
    path = build.build(torch.float32)
    assert path == build.library_path(torch.float32) == build.build(torch.float32)
    assert code_of(path) == b"made\n"
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
    assert code_of(paths[0]) == b"ma\nde\n"
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


# -- what lies in the cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:20], lambda content: b"x" + content[1:], lambda content: b"x" * 32],
    ids=["empty", "cut", "another byte", "only a digest"],
)
def test_a_damaged_library_is_compiled_again(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    folder = compiler('echo a library > "$out"')
    path = build.build(torch.float32)
    path.write_bytes(damage(path.read_bytes()))
    assert not build.is_built(torch.float32)
    caplog.clear()
    assert code_of(build.build(torch.float32)) == b"a library\n"
    assert [line.getMessage() for line in caplog.records] == [f"The native code is compiled again: {path} is damaged"]
    assert num_calls(folder) == 2
    assert build.is_built(torch.float32)


def test_folders_and_library_are_for_this_user_only_whatever_the_umask(compiler: Compiler) -> None:
    folder = compiler('echo a library > "$out"')
    before = os.umask(0)
    try:
        path = build.build(torch.float32)
    finally:
        os.umask(before)
    modes = [place.stat().st_mode & 0o777 for place in (folder / "cache", path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_a_symbolic_link_in_place_of_the_library_is_replaced_and_not_followed(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('echo a library > "$out"')
    path = build.build(torch.float32)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    content = elsewhere.read_bytes()
    path.symlink_to(elsewhere)
    assert not build.is_built(torch.float32)
    build.build(torch.float32)
    assert f"{path} is a symbolic link" in caplog.text
    assert not path.is_symlink()
    assert code_of(path) == b"a library\n"
    assert elsewhere.read_bytes() == content


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_a_library_that_others_can_write_to_is_compiled_again(compiler: Compiler, mode: int) -> None:
    folder = compiler('echo a library > "$out"')
    path = build.build(torch.float32)
    path.chmod(mode)
    build.build(torch.float32)
    assert num_calls(folder) == 2
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_library_of_another_user_is_compiled_again(compiler: Compiler) -> None:
    folder = compiler('echo a library > "$out"')
    path = build.build(torch.float32)
    os.chown(path, 12345, -1)
    assert not build.is_built(torch.float32)
    build.build(torch.float32)
    assert (num_calls(folder), path.stat().st_uid) == (2, 0)


def shared_by_others(folder: Path) -> str:
    folder.chmod(0o777)
    return f"other users can write to {folder} (chmod go-w {folder} prevents it)"


def shared_and_sticky(folder: Path) -> str:
    folder.chmod(0o1777)
    return f"other users can write to {folder} "


def shared_above(folder: Path) -> str:
    folder.parent.chmod(0o770)
    return f"other users can write to {folder.parent} "


def given_away(folder: Path) -> str:
    if os.geteuid() != 0:  # `.ci/run` is root in a container; other users run the four cases that they can bring about
        pytest.skip("only root can give folders away")
    os.chown(folder, 12345, -1)
    return f"{folder} belongs to another user (12345)"


def linked_to_a_shared_folder(folder: Path) -> str:
    shared = folder.parent.parent / "shared"
    folder.rename(shared)
    folder.symlink_to(shared)
    return shared_by_others(shared)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "spoil", [shared_by_others, shared_and_sticky, shared_above, given_away, linked_to_a_shared_folder]
)
def test_in_a_folder_that_others_can_change_no_library_is_loaded_or_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], str],
) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    script = tmp_path / "small-g++"
    script.write_text(
        f'#!/bin/sh\nfor out; do :; done\n[ "$out" = --version ] || exec g++ -shared -fPIC {source} -o "$out"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    planted = build.build(torch.float32)
    planted.write_bytes(b"planted")
    reason = spoil(planted.parent)
    assert not build.is_built(torch.float32)
    assert build.load(torch.float32).answer() == 42
    (line,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert line.getMessage().startswith(f"The native code is compiled anew at each start, because {reason}")
    assert planted.read_bytes() == b"planted"


def test_without_any_private_folder_nothing_is_loaded(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo a library > "$out"')
    path = build.build(torch.float32)
    path.parent.chmod(0o777)
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o777)  # not sticky
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    with pytest.raises(BuildError, match=r"^there is no private folder for it: other users can write to .*/tmp "):
        build.load(torch.float32)


def test_two_processes_that_start_at_once_both_find_a_sound_library(compiler: Compiler) -> None:
    folder = compiler('echo ma > "$out"; touch $0.$$; until [ $(ls $0.* | wc -l) = 2 ]; do :; done; echo de >> "$out"')
    code = (
        "import torch; from oaiserve.engine.model.cpu import build; path = build.build(torch.float32);"
        "print(path, build.is_built(torch.float32))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=100)[0].split() for process in processes]
    path = build.library_path(torch.float32)
    assert said == [[str(path), "True"]] * 2
    assert code_of(path) == b"ma\nde\n"
    assert list(path.parent.iterdir()) == [path]
    assert num_calls(folder) == 2


def test_a_library_is_built_beside_other_work_once_and_without_an_error(compiler: Compiler) -> None:
    folder = compiler('echo made > "$out"')
    for _ in range(2):
        build.build_beside(torch.float32, "blocks", native_build=False).join()
    assert build.is_built(torch.float32, "blocks")
    assert num_calls(folder) == 1
    compiler("exit 1")
    build.build_beside(torch.bfloat16, "blocks", native_build=False).join()
    assert not build.is_built(torch.bfloat16, "blocks")
