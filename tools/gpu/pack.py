"""Packs what the GPU check needs, beside the sources, on a machine without a network: packages and compiled kernels.

    TRITON_CACHE_DIR=CACHE python -m tools.gpu_check --dry-run
    python -m tools.gpu.pack [--out FOLDER] [--python 3.12] [--kernels CACHE]

The machine has torch and triton. FOLDER gets the other packages for that version of Python. Compiled kernels in CACHE
are of use if the dry run's version of Triton is the machine's; others are compiled there. There, too,
`sh tools/gpu/check.sh figures` and `sh tools/gpu/check.sh answers` run the two calls, and leave files in $OUT.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import machine

# The machine has these, and they are large or belong together.
THERE = ("torch", "triton", "numpy", "sympy", "mpmath", "networkx", "setuptools")
UNUSED = ("hf-xet",)  # it speeds up downloads
ADDED = ("psutil", "pytest", "hypothesis")  # needed by tools.bench, and by models of the tests
SCRIPT = Path(__file__).with_name("check.sh")
GLIBC = range(17, 32)  # minor versions that wheels may need; the machine has at least the last one
MOST_BYTES = 64 << 20  # for the sources and all that is packed
KERNELS = "kernels"
# Triton's cache needs the code and the description of a compiled kernel. Its other files are for people.
KEPT_OF_KERNEL = (".cubin", ".json")
FOLDER_OF_KERNELS = "@KERNELS@"  # stands for the folder of the cache, whose files name it


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".pack"), help="folder for the files (default %(default)s)")
    parser.add_argument("--python", default="3.12", help="the version there (default %(default)s)")
    parser.add_argument("--kernels", type=Path, metavar="CACHE", help="a folder of Triton's cache")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / machine.COMMIT).write_text(machine.version())
    with tempfile.TemporaryDirectory() as temporary:
        installed = Path(temporary) / "packages"
        subprocess.run(install(arguments.python, installed), check=True)
        with tarfile.open(out / "packages.tar.gz", "w:gz") as file:
            file.add(installed, "packages")
    if arguments.kernels is not None:
        pack_kernels(arguments.kernels, out / f"{KERNELS}.tar.gz")
    sources = sum(Path(name).lstat().st_size for name in _committed())
    packed = sum(path.stat().st_size for path in out.iterdir())
    for path in sorted(out.iterdir()):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print(f"With {sources / 1e6:.1f} MB of sources: {(sources + packed) / 1e6:.1f} MB of {MOST_BYTES / 1e6:.1f} MB.")
    return 0 if sources + packed < MOST_BYTES else 1


def _committed() -> list[str]:
    said = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    return [name for name in said.split("\0") if name]


def install(python: str, folder: Path) -> list[str]:
    """Return the command that installs the packages into a folder."""
    # pip takes no wheels for an older glibc than the one that is named.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "any"]
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    words += ["--only-binary", ":all:", "--python-version", python, "--target", str(folder)]
    for platform in platforms:
        words += ["--platform", platform]
    return words + packages()


def packages() -> list[str]:
    """Return oaiserve's dependencies except THERE, as `name==version`, in the versions installed here."""
    needed: dict[str, str] = {}
    for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
        _closure(Requirement(requirement).name, needed)
    for name in ADDED:
        _closure(name, needed)
    return [f"{name}=={version}" for name, version in needed.items() if name not in THERE + UNUSED]


def _closure(name: str, found: dict[str, str]) -> None:
    """Add a package and all that it needs, without extras, by canonical name."""
    name = canonicalize_name(name)
    if name in found:
        return
    try:
        installed = distribution(name)
    except PackageNotFoundError:  # for other systems, or other versions of Python
        return
    found[name] = installed.version
    for requirement in map(Requirement, installed.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            _closure(requirement.name, found)


def pack_kernels(cache: Path, archive: Path) -> None:
    """Pack what Triton reads of a cache. Its files that name others do so by a path for which another one is put in."""
    with tarfile.open(archive, "w:gz") as file:
        for path in sorted(cache.rglob("*")):
            if path.suffix not in KEPT_OF_KERNEL:
                continue
            content = path.read_bytes()
            if path.name.startswith("__grp__"):
                content = content.replace(bytes(cache.absolute()), FOLDER_OF_KERNELS.encode())
            about = tarfile.TarInfo(str(Path(KERNELS) / path.relative_to(cache)))
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
