"""The native code is compiled once for each set of inputs, and never left half written. The compilers are scripts."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oaiserve.engine.executors.native import build
from oaiserve.engine.executors.native.build import BuildError

Compiler = Callable[[str], Path]


def code_of(path: Path) -> bytes:
    """Return the compiler's output, which the digest follows."""
    content = path.read_bytes()
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()
    return content[:-32]


def calls(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "calls.txt").read_text().splitlines()]


def num_libraries(folder: Path) -> int:
    """Return how many libraries have been linked."""
    return sum("-c" not in call for call in calls(folder))


def test_a_library_is_compiled_once_for_each_dtype(compiler: Compiler) -> None:
    folder = compiler('echo made > "$out"')
    path = build.build(torch.float32)
    assert path == build.library_path(torch.float32) == build.build(torch.float32)
    assert code_of(path) == b"made\n"
    assert path.is_relative_to(folder / "cache")
    other = build.build(torch.bfloat16)
    assert num_libraries(folder) == 2
    units = Counter(
        (call[call.index("-c") + 1], *(flag for flag in call if "ELEMENT" in flag))
        for call in calls(folder)
        if "-c" in call
    )
    decoder = str(build.SOURCES / "decoder.cpp")
    blocks = str(build.SOURCES / "blocks.cpp")
    assert units == Counter([(decoder, "-DELEMENT=float"), (decoder, "-DELEMENT=bf16"), (blocks,)])
    (shared,) = path.parent.glob("blocks-*.o")
    assert code_of(shared) == b"made\n"
    assert sorted(path.parent.iterdir()) == sorted([path, other, shared]), "no other files are left"


def test_a_damaged_part_of_libraries_is_compiled_again(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    folder = compiler('echo made > "$out"')
    (shared,) = build.build(torch.float32).parent.glob("blocks-*.o")
    shared.write_bytes(b"x" + shared.read_bytes()[1:])
    build.build(torch.bfloat16)
    assert code_of(shared) == b"made\n"
    assert caplog.messages == [f"The native code is compiled again: {shared} is damaged"]
    assert [call[call.index("-c") + 1] for call in calls(folder)[-3:-1]].count(str(build.SOURCES / "blocks.cpp")) == 1


def test_a_built_library_does_not_wait_for_a_process_that_compiles_another(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo made > "$out"')
    path = build.build(torch.float32)
    monkeypatch.setattr(build, "_alone_in", lambda folder: pytest.fail(f"it waits until it is alone in {folder}"))
    assert build.build(torch.float32) == path


def test_the_compiler_may_have_arguments(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiler('echo made > "$out"')
    alone = build.library_path(torch.float32)
    monkeypatch.setenv("CXX", f"'{folder}/fake-g++' --first 'with space'")
    assert build.build(torch.float32) != alone
    assert (folder / "calls.txt").read_text().startswith("--first with space ")


def test_the_name_depends_on_sources_flags_cpu_and_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("")
    sources = tmp_path / "src"
    script = tmp_path / "fake-g++"
    header = sources / "simd.h"
    shutil.copytree(build.SOURCES, sources)
    names = []
    for change in (
        lambda: monkeypatch.setattr(build, "SOURCES", sources),
        lambda: header.write_text(f"{header.read_text()}// more\n"),
        lambda: header.rename(sources / "vectors.h"),
        lambda: monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"]),
        lambda: monkeypatch.setattr(build, "_cpu_features", lambda: "flags: avx2"),
        lambda: script.write_text(script.read_text().replace("fake 1.0", "fake 2.0")),
    ):
        change()
        names.append(build.library_path(torch.float32))
    assert len(set(names)) == 6
    assert build.library_path(torch.float32) == names[-1]


def test_the_name_depends_on_the_features_of_the_cpu_but_not_on_its_clock(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"

    def features(mhz: int = 0, flags: str = "") -> str:
        if flags:
            core = f"model name\t: A\nflags\t\t: {flags}\ncpu MHz\t\t: {mhz}\n\n"
            path.write_text(core + core.replace(str(mhz), "1"))
        return build._cpu_features(path)

    assert features() == torch.backends.cpu.get_cpu_capability(), "the system does not tell"
    assert features(2000, "sse avx") == features(3000, "sse avx")
    assert features(2000, "sse avx") != features(2000, "sse avx avx512f")


def test_the_first_error_of_the_compiler_is_reported_and_no_file_is_left(compiler: Compiler) -> None:
    folder = compiler('echo half > "$out"; echo "In file a.h:\na.h:1: error: no such thing\nerror: too" >&2; exit 1')
    with pytest.raises(BuildError, match=r"fake-g\+\+ failed: a.h:1: error: no such thing$"):
        build.build(torch.float32)
    assert list((folder / "cache" / "native").iterdir()) == []
    compiler("exit 1")
    with pytest.raises(BuildError, match="failed: no message"):
        build.build(torch.float32)


def no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(folder))


def no_private_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(torch.float32).parent.chmod(0o777)
    shared = folder / "tmp"
    shared.mkdir()
    shared.chmod(0o777)  # not sticky
    monkeypatch.setattr("tempfile.tempdir", str(shared))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (lambda _, patch: patch.setenv("CXX", "g++-99"), r"^the compiler g\+\+-99 that CXX names was not found$"),
        (no_compiler, r"^no C\+\+ compiler was found \(install g\+\+\)$"),
        (lambda folder, _: (folder / "fake-g++").write_bytes(b"\x7fELF?"), "cannot be run: Exec format error"),
        (
            lambda _, patch: patch.setenv("OAISERVE_CACHE", "/dev/null"),
            "null/native cannot be written: Not a directory",
        ),
        (no_private_folder, r"^there is no private folder for it: other users can write to .*/tmp "),
        (lambda *_: None, r"float-[0-9a-f]{16}\.so cannot be loaded: "),
    ],
)
def test_what_prevents_native_code_is_named_in_the_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, problem: Callable[..., object], reason: str
) -> None:
    problem(compiler('echo made > "$out"'), monkeypatch)
    with pytest.raises(BuildError, match=reason):
        build.load(torch.float32)
    with pytest.raises(BuildError, match="the native step supports bfloat16 and float32, not float16"):
        build.library_path(torch.float16)


# -- what lies in the cache -------------------------------------------------------------------------------------------


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    def spoil(path: Path) -> str:
        path.write_bytes(change(path.read_bytes()))
        return f"{path} is damaged"

    return spoil


def linked(path: Path) -> str:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")
    return f"{path} is a symbolic link"


def writable_for_others(path: Path) -> str:
    path.chmod(0o620)
    return f"other users can write to {path}"


def of_another_user(path: Path) -> str:
    if os.geteuid() != 0:  # `.ci/run` is root in a container; other users run the five cases that they can bring about
        pytest.skip("only root can give files away: .ci/run is root in a container")
    os.chown(path, 12345, -1)
    return f"other users can write to {path}"


@pytest.mark.parametrize(
    "spoil",
    [
        damaged(lambda code: b"x" * 32),
        damaged(lambda code: code[:20]),
        damaged(lambda code: b"x" + code[1:]),
        *(linked, writable_for_others, of_another_user),
    ],
    ids=["only a digest", "cut", "another byte", "a link", "mode", "owner"],
)
def test_a_library_that_cannot_be_trusted_is_compiled_again(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    folder = compiler('echo a library > "$out"')
    path = build.build(torch.float32)
    reason = spoil(path)
    assert not build.is_built(torch.float32)
    caplog.clear()
    assert code_of(build.build(torch.float32)) == b"a library\n"
    assert caplog.messages == [f"The native code is compiled again: {reason}"]
    assert num_libraries(folder) == 2
    assert build.is_built(torch.float32)
    assert (path.is_symlink(), path.stat().st_mode & 0o777, path.stat().st_uid) == (False, 0o600, os.geteuid())
    if spoil is linked:
        assert (path.parent / "elsewhere").exists(), "what a link names is not written"


def test_folders_and_library_are_for_this_user_only_whatever_the_umask(compiler: Compiler) -> None:
    folder = compiler('echo a library > "$out"')
    before = os.umask(0)
    try:
        path = build.build(torch.float32)
    finally:
        os.umask(before)
    modes = [place.stat().st_mode & 0o777 for place in (folder / "cache", path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def shared(folder: Path, mode: int = 0o777) -> str:
    folder.chmod(mode)
    return f"other users can write to {folder} (chmod go-w {folder} prevents it)"


def shared_and_sticky(folder: Path) -> str:
    return shared(folder, 0o1777)


def shared_above(folder: Path) -> str:
    return shared(folder.parent, 0o770)


def given_away(folder: Path) -> str:
    if os.geteuid() != 0:  # `.ci/run` is root in a container; other users run the four cases that they can bring about
        pytest.skip("only root can give folders away: .ci/run is root in a container")
    os.chown(folder, 12345, -1)
    return f"{folder} belongs to another user (12345)"


def linked_to_a_shared_folder(folder: Path) -> str:
    target = folder.rename(folder.parent.parent / "shared")
    folder.symlink_to(target)
    return shared(target)


@pytest.mark.compiler
@pytest.mark.parametrize("spoil", [shared, shared_and_sticky, shared_above, given_away, linked_to_a_shared_folder])
def test_in_a_folder_that_others_can_change_no_library_is_loaded_or_written(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    compiler(f'g++ -shared -fPIC {source} -o "$out"')
    planted = build.build(torch.float32)
    planted.write_bytes(b"planted")
    reason = spoil(planted.parent)
    assert not build.is_built(torch.float32)
    assert build.load(torch.float32).answer() == 42
    (line,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert line.getMessage().startswith(f"The native code is compiled again at each start, because {reason}")
    assert planted.read_bytes() == b"planted"


def test_of_two_processes_that_start_at_once_one_compiles_and_both_find_a_sound_library(compiler: Compiler) -> None:
    folder = compiler('echo made > "$out"')
    code = (
        "import torch; from oaiserve.engine.executors.native import build; path = build.build(torch.float32);"
        "print(path, build.is_built(torch.float32))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].split() for process in processes]
    path = build.library_path(torch.float32)
    assert said == [[str(path), "True"]] * 2
    assert code_of(path) == b"made\n"
    assert num_libraries(folder) == 1


def test_a_library_is_built_beside_other_work_once_and_without_an_error(compiler: Compiler) -> None:
    folder = compiler('echo made > "$out"')
    thread = build.build_beside(torch.float32)
    assert thread is not None
    thread.join()
    assert build.is_built(torch.float32)
    assert build.build_beside(torch.float32) is None
    assert num_libraries(folder) == 1
    compiler("exit 1")
    thread = build.build_beside(torch.bfloat16)
    assert thread is not None
    thread.join()
    assert not build.is_built(torch.bfloat16)
