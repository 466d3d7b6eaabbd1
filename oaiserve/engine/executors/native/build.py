"""The native code comes with the wheel, or is compiled once by the machine's compiler, for its CPU, and stays on disk.

The name of a compiled library includes a hash of the sources, the compiler, its flags and the CPU's features. So it is
never used with other sources or on another kind of CPU, and only one of several servers builds it.

The server runs the code in that file, so it is loaded only from a folder that others can't write to. The file ends with
the SHA-256 of everything before it, which loaders ignore, because a truncated or corrupt file would crash the server.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread

import torch

from oaiserve.checkpoints.progress import Elapsed
from oaiserve.config import CpuFeatures
from oaiserve.engine.executors.native import prebuilt, variants
from oaiserve.engine.executors.native.compiler_process import compiler_process
from oaiserve.errors import StartupError
from oaiserve.storage import private
from oaiserve.storage.private import NotPrivate, cache_folder

log = logging.getLogger(__name__)

SOURCES = variants.SOURCES
ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "float"}
_building = {dtype: Lock() for dtype in ELEMENTS}
FLAGS = [*variants.FLAGS, "-march=native"]
POLL_SECONDS = 0.5  # interval between updates of the elapsed compile time
_FORMAT = "with digest"  # part of the name, since older versions wrote no digest


class BuildError(Exception):
    """The library cannot be built or loaded. The message is one sentence, for example the compiler's first error."""


def limit_features(wanted: CpuFeatures) -> None:
    """Limit this process, and those that it starts, to the instructions that --cpu-features allows.

    Raises StartupError if torch has already used others.
    """
    if wanted == "native":
        return
    os.environ |= {prebuilt.LIMIT: wanted, "ONEDNN_MAX_CPU_ISA": wanted.upper()}
    if (used := torch.backends.cpu.get_cpu_capability()) != wanted.upper():
        raise StartupError(f"--cpu-features {wanted} cannot be had: torch uses {used} in this process or on this CPU.")


def library_path(dtype: torch.dtype) -> Path:
    """Return the path where `load` expects the library. A library in the wheel is preferred if it fits.

    Raises BuildError if there is no compiler for it, or no native code for the dtype.
    """
    kind = _kind(dtype)
    return prebuilt.find(kind) or _compiled_path(kind)


def _compiled_path(kind: str) -> Path:
    return _cached_path(kind, _flags(kind), ".so")


def _cached_path(name: str, flags: list[str], suffix: str) -> Path:
    """Return the path of the file that the compiler writes for the sources with these flags."""
    compiler = _compiler()
    parts = (_FORMAT, _version(compiler), *compiler[1:], *flags, _cpu_features())
    digest = variants.digest(*parts, sources=SOURCES).hex()
    return cache_folder() / "native" / f"{name}-{digest[:16]}{suffix}"


def is_built(dtype: torch.dtype) -> bool:
    """Return whether `load` will find the library on disk. Raises BuildError as `library_path` does."""
    path = library_path(dtype)
    if path.parent == prebuilt.FOLDER:
        return True
    try:
        return _is_sound(private.verified(path.parent) / path.name)
    except (NotPrivate, OSError):
        return False


def build(dtype: torch.dtype) -> Path:
    """Compile the library unless it is on disk, and return its path. Compiling takes about twenty seconds on two cores.

    Waits if another thread or process is building it. Raises BuildError, and NotPrivate if others can write to the
    folder of the library.
    """
    path = _compiled_path(_kind(dtype))
    try:
        private.make_folder(path.parent)
        path = private.verified(path.parent) / path.name
        if _flaw(path) is None:
            return path  # Don't wait for a process that compiles another library.
        with _building[dtype], _alone_in(path.parent):
            if not _is_sound(path):
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    _compile(Path(folder) / path.name, dtype, path.parent).replace(path)
    except OSError as error:
        advice = "set OAISERVE_CACHE to another folder"
        raise BuildError(f"{path.parent} cannot be written: {error.strerror} ({advice})") from error
    return path


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process builds into the folder, and lock the folder during the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # The system releases the lock, however this process ends.
        yield
    finally:
        os.close(descriptor)


def build_beside(dtype: torch.dtype) -> Thread | None:
    """Build the library in a thread and return the thread, or None if the library exists. `load` reports errors.

    A start that fails doesn't wait for it.
    """
    try:
        if is_built(dtype):
            return None
    except BuildError:
        return None

    def run() -> None:
        with suppress(BuildError, NotPrivate):
            build(dtype)

    thread = Thread(target=run, name="compile", daemon=True)
    thread.start()
    return thread


def _compile(path: Path, dtype: torch.dtype, objects: Path) -> Path:
    """Compile the library to this path, in a separate folder.

    The folder `objects` keeps the parts that the libraries of all dtypes share.
    """
    flags = _flags(_kind(dtype))
    shared_flags = _flags()
    shared = objects / _cached_path("blocks", shared_flags, ".o").name
    main = path.with_suffix(".o")
    units = [[*flags, "-c", str(SOURCES / variants.MAIN_SOURCE), "-o", str(main)]]
    new = None if _is_sound(shared) else path.with_name(shared.name)
    if new:
        units.append([*shared_flags, "-c", str(SOURCES / variants.BLOCKS_SOURCE), "-o", str(new)])
    with Elapsed("Compiling native code") as elapsed:
        if elapsed.is_first:
            log.info("Compiling native code, once for this machine. It takes about half a minute")
        _run_compilers(units, elapsed)
        if new:
            _seal(new).replace(shared)
        _run_compilers([[*flags, str(main), str(shared), "-o", str(path)]], elapsed)
    return _seal(path)


def _run_compilers(arguments: list[list[str]], elapsed: Elapsed) -> None:
    """Run the compiler for each of these lists of arguments in parallel. Raises BuildError if one fails."""
    compiler = _compiler()
    with ExitStack() as processes:
        runs = []
        for each in arguments:
            command = [*compiler, *each]
            log.debug("Compiling: %s", shlex.join(command))
            runs.append(processes.enter_context(compiler_process(command)))
        for run in runs:
            said: str | None = None
            while said is None:
                try:
                    _, said = run.communicate(timeout=POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    elapsed.show()
            if run.returncode != 0:
                errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
                raise BuildError(f"{shlex.join(compiler)} failed: {(errors or ['no message'])[0]}")


def _seal(path: Path) -> Path:
    variants.seal(path)
    path.chmod(private.FILE_MODE)
    return path


def _is_sound(path: Path) -> bool:
    """Return whether the file at the path is as `_compile` wrote it. If it exists but isn't, log what is wrong."""
    flaw = _flaw(path)
    if flaw:
        log.warning("The native code is compiled again: %s", flaw)
    return flaw is None


def _flaw(path: Path) -> str | None:
    """Return the flaw of the file at the path, "" if the file is missing, or None if it is as `_compile` wrote it."""
    try:
        content = private.read_file(path)
    except FileNotFoundError:
        return ""
    except (NotPrivate, OSError) as error:
        return str(error)
    return None if variants.is_sound(content) else f"{path} is damaged"


def _kind(dtype: torch.dtype) -> str:
    if dtype not in ELEMENTS:
        raise BuildError(f"the native step supports bfloat16 and float32, not {str(dtype).removeprefix('torch.')}")
    return ELEMENTS[dtype]


def _flags(kind: str | None = None) -> list[str]:
    """Return the flags for libraries of one kind, or for the parts that libraries of all kinds share."""
    has_amx = prebuilt.usable_features() >= variants.AMX_FEATURES
    limit = ["-mno-avx512f"] if prebuilt.is_limited() else []
    amx = [variants.AMX_FLAG] if has_amx else []
    return [*FLAGS, *limit, *amx, *([variants.kind_flag(kind)] if kind else [])]


def _compiler() -> list[str]:
    """Return the compiler's program and its first arguments. CXX may be "ccache g++", for example."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if path := shutil.which(name):
            return [path, *arguments]
    raise BuildError(
        f"the compiler {named[0]} that CXX names was not found" if named else "no C++ compiler was found (install g++)"
    )


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"the compiler {compiler[0]} cannot be run: {error.strerror}") from error


def _cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return a description of the CPU that determines the result of `-march=native`."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))


def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Load the wheel's library, or else one compiled on this machine, now or earlier. Raises BuildError.

    If others can write to the folder of compiled libraries, the library is compiled and loaded in a temporary folder
    instead, which is then removed.
    """
    kind = _kind(dtype)
    if path := prebuilt.find(kind):
        return _open(path)
    try:
        return _open(build(dtype))
    except NotPrivate as reason:
        log.warning("The native code is compiled again at each start, because %s", reason)
    with tempfile.TemporaryDirectory(prefix="oaiserve-") as folder:
        try:
            private.verified(Path(folder))
        except NotPrivate as reason:
            raise BuildError(f"there is no private folder for it: {reason}") from reason
        return _open(_compile(Path(folder) / _compiled_path(kind).name, dtype, Path(folder)))


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
