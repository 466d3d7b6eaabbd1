"""Compiles the native step with the machine's own compiler, for the machine's own CPU. Once: the library stays on disk.

Its name says what it was made of: the sources, the compiler, its flags and what the CPU can do. So a library is never
used with other sources or on another kind of CPU, and servers that start together may build it side by side.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from oaiserve.cache import cache_folder
from oaiserve.config import Quantize

SOURCES = Path(__file__).parent / "src"
ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "float"}
FLAGS = [
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"),
]


class BuildError(Exception):
    """In one sentence: what is missing, or the compiler's first complaint."""


def library_path(dtype: torch.dtype, quantize: Quantize = "none") -> Path:
    """Where the library for `dtype` and quantized weights is, or would be. Raises BuildError where there is no
    compiler, and for a dtype that has no native step."""
    compiler = _compiler()
    if dtype not in ELEMENTS:
        raise BuildError(f"the native step knows bfloat16 and float32, not {str(dtype).removeprefix('torch.')}")
    digest = hashlib.sha256()
    for part in (_version(compiler), *compiler[1:], *_flags(dtype, quantize), _cpu_features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    name = ELEMENTS[dtype] if quantize == "none" else f"{ELEMENTS[dtype]}-{quantize}"
    return cache_folder() / "native" / f"{name}-{digest.hexdigest()[:16]}.so"


def build(dtype: torch.dtype, quantize: Quantize = "none") -> Path:
    """The library for `dtype`, compiled unless it is there: some ten seconds on one core. Raises BuildError."""
    path = library_path(dtype, quantize)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            source = str(SOURCES / "decoder.cpp")
            compiler = _compiler()
            command = [*compiler, *_flags(dtype, quantize), source, "-o", str(made)]
            # With low priority: the server answers from its slower path meanwhile, and needs the cores more.
            priority = ["nice", "-n", "10"] if shutil.which("nice") else []
            run = subprocess.run([*priority, *command], capture_output=True, text=True, check=False)
            if run.returncode != 0:
                complaints = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
                raise BuildError(f"{shlex.join(compiler)} failed: {(complaints or ['no message'])[0]}")
            made.replace(path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written: {error.strerror}") from error
    return path


def _flags(dtype: torch.dtype, quantize: Quantize) -> list[str]:
    return [*FLAGS, f"-DELEMENT={ELEMENTS[dtype]}", *(["-DINT8_WEIGHTS"] if quantize == "int8" else [])]


def _compiler() -> list[str]:
    """The program and its first arguments, for CXX may be "ccache g++"."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [asked] if asked else [["g++"], ["clang++"], ["c++"]]:
        if found := shutil.which(name):
            return [found, *arguments]
    raise BuildError(
        f"the compiler {asked[0]} that CXX names was not found" if asked else "no C++ compiler was found (install g++)"
    )


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"the compiler {compiler[0]} cannot be run: {error.strerror}") from error


def _cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What `-march=native` depends on."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))


def load(dtype: torch.dtype, quantize: Quantize = "none") -> ctypes.CDLL:
    """Raises BuildError."""
    path = build(dtype, quantize)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
