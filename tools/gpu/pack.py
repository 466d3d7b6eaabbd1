"""Packs what the GPU check needs on a machine without a network, and prints the commands to run there.

    python -m tools.gpu.pack --out FOLDER [--python 3.12]

The machine has torch, triton and transformers. FOLDER gets one archive: the committed sources, and the wheels of the
other packages for that version of Python.
"""

from __future__ import annotations

import argparse
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
THERE = ("torch", "transformers", "triton")  # and all that these need
MOST_BYTES = 64 << 20  # that travel
COMMANDS = """\
tar xzf oaiserve-gpu.tar.gz && cd oaiserve-gpu
python3 -m pip install --no-index --no-deps --target packages wheels/*.whl
PYTHONPATH=.:packages timeout -s INT 590 python3 -m tools.gpu_check --out "$OUT" --budget-seconds 540
PYTHONPATH=.:packages timeout -s INT 590 python3 -m tools.gpu_check --out "$OUT" --budget-seconds 540 --resume
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive")
    parser.add_argument("--python", default="3.12", help="the version there (default %(default)s)")
    parser.add_argument("--platform", default="manylinux_2_31_x86_64", help="of wheels (default %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    archive = arguments.out / "oaiserve-gpu.tar.gz"
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "oaiserve-gpu"
        wheels = there / "wheels"
        wheels.mkdir(parents=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        platforms = ["--platform", arguments.platform, "--platform", "manylinux2014_x86_64", "--platform", "any"]
        download += [*platforms, "--python-version", arguments.python, "--dest", str(wheels), *packages()]
        subprocess.run(download, check=True)
        tree = subprocess.run(["git", "archive", "HEAD", *SOURCES], check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(there)], input=tree, check=True)
        (there / machine.COMMIT).write_text(machine.version())
        with tarfile.open(archive, "w:gz") as file:
            file.add(there, there.name)
    size = archive.stat().st_size
    print(f"{archive}: {size / 1e6:.1f} MB. There:\n\n{COMMANDS}")
    return 0 if size < MOST_BYTES else 1


def packages() -> list[str]:
    """Return what oaiserve needs beside THERE, as `name==version`, by what is installed here."""
    there: dict[str, str] = {}
    for name in THERE:
        _closure(name, there)
    needed: dict[str, str] = {}
    for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
        _closure(Requirement(requirement).name, needed)
    _closure("psutil", needed)  # of tools.bench
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
