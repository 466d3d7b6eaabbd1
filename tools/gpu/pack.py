"""Packs what the GPU check needs on a machine without a network, and prints the commands to run there.

    python -m tools.gpu.pack [--out FOLDER] [--python 3.12]

The machine has torch and triton. FOLDER gets one archive: the committed sources, and the wheels of the other packages
for that version of Python. The command that is printed runs for at most ten minutes, and leaves three files in $OUT.
Run it again for the sections that are left; on another machine, with gpu_check.json beside the archive's folder.
"""

from __future__ import annotations

import argparse
import shutil
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

SOURCES = ("oaiserve", "tools", "loadtest", "tests")
SCRIPT = Path(__file__).with_name("check.sh")
THERE = ("torch", "triton", "numpy")  # and all that these need
GLIBC = range(17, 32)  # minor versions that wheels may need; the machine has at least the last one
MOST_BYTES = 64 << 20  # the largest archive
COMMAND = "mkdir -p build && tar xzf {archive} -C build && sh build/oaiserve-gpu/check.sh"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the archive (default %(default)s)")
    parser.add_argument("--python", default="3.12", help="the version there (default %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    archive = arguments.out / "oaiserve-gpu.tar.gz"
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "oaiserve-gpu"
        wheels = there / "wheels"
        wheels.mkdir(parents=True)
        subprocess.run(download(arguments.python, wheels), check=True)
        tree = subprocess.run(["git", "archive", "HEAD", *SOURCES], check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(there)], input=tree, check=True)
        (there / machine.COMMIT).write_text(machine.version())
        shutil.copy(SCRIPT, there)
        with tarfile.open(archive, "w:gz") as file:
            file.add(there, there.name)
    size = archive.stat().st_size
    print(f"{archive}: {size / 1e6:.1f} MB. There, until no section is left out:\n\n{COMMAND.format(archive=archive)}")
    return 0 if size < MOST_BYTES else 1


def download(python: str, folder: Path) -> list[str]:
    """Return the command that downloads the wheels."""
    # pip takes no wheels for an older glibc than the one that is named.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "any"]
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    for platform in platforms:
        words += ["--platform", platform]
    return [*words, "--python-version", python, "--dest", str(folder), *packages()]


def packages() -> list[str]:
    """Return oaiserve's dependencies except THERE, as `name==version`, in the versions installed here."""
    there: dict[str, str] = {}
    for name in THERE:
        _closure(name, there)
    needed: dict[str, str] = {}
    for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
        _closure(Requirement(requirement).name, needed)
    _closure("psutil", needed)  # tools.bench needs it
    return [f"{name}=={version}" for name, version in needed.items() if name not in there]


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


if __name__ == "__main__":
    sys.exit(main())
