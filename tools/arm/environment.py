"""Prepares Python, torch and this project for aarch64 in build/arm, to run in QEMU. Nothing is installed on the system.

Python and the system's libraries are unpacked from Debian's packages, the others from wheels. What is there already
stays.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/arm"
SYSROOT = FOLDER / "sysroot"
PACKAGES = FOLDER / "packages"
OURS = FOLDER / "oaiserve"
EMULATOR = "qemu-aarch64"
COMPILER = "aarch64-linux-gnu-g++"
NEEDED = {EMULATOR: "qemu-user", COMPILER: "g++-aarch64-linux-gnu", "apt-get": "apt", "dpkg": "dpkg"}
NEEDED_BYTES = 3 * 10**9
PYTHON = "3.11"  # Debian 12 has this version.
DEBIAN_PACKAGES = (
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "libcrypt1", "zlib1g", "libexpat1", "libssl3", "libffi8"),
    *("libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1"),
)
# The last one whose wheel for aarch64 is for CPUs alone. Later ones need 2 GB of CUDA's libraries to be imported.
TORCH = "2.10.0"
GLIBC_MINORS = range(17, 37)  # Debian 12's glibc is 2.36.


def prepare() -> None:
    """Prepare everything that is not there yet, or exit with a sentence about what is missing."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        packages = " ".join(NEEDED[name] for name in missing)
        sys.exit(f"This needs {', '.join(missing)}. On Debian, install {packages}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (SYSROOT.exists() and PACKAGES.exists()) and shutil.disk_usage(FOLDER).free < NEEDED_BYTES:
        sys.exit(f"{FOLDER} needs {NEEDED_BYTES / 1e9:.0f} GB of free space.")
    if not SYSROOT.exists():
        print(f"Downloading Python {PYTHON} for aarch64 (11 MB) ...", flush=True)
        unpack_python(SYSROOT)
    wanted = "\n".join(needed_packages())
    if _stamp(PACKAGES) != wanted:
        print("Downloading torch and other packages for aarch64 (250 MB) ...", flush=True)
        install(wanted.splitlines(), PACKAGES)
        _write_stamp(PACKAGES, wanted)
    sources = digest_of_sources()
    if _stamp(OURS) != sources:
        print("Building the wheel for aarch64 (some minutes) ...", flush=True)
        build_wheel(OURS)
        _write_stamp(OURS, sources)


def command(cpu: str, *arguments: str, variables: dict[str, str]) -> list[str]:
    """Return the command that runs Python on an emulated CPU."""
    # Pointer authentication, which libraries use, takes most of an emulator's time unless it is simplified.
    options = ",pauth-impdef=on" if cpu == "max" else ""
    settings = {"PYTHONPATH": f"{OURS}:{PACKAGES}", "PYTHONNOUSERSITE": "1", **variables}
    flags = [part for name, value in settings.items() for part in ("-E", f"{name}={value}")]
    python = str(SYSROOT / f"usr/bin/python{PYTHON}")
    return [EMULATOR, "-cpu", cpu + options, "-L", str(SYSROOT), *flags, python, "-P", *arguments]


def unpack_python(folder: Path) -> None:
    """Unpack Debian's packages into the folder. The lists of packages for aarch64 stay apart from the system's."""
    apt = FOLDER / "apt"
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt / "cache",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", "-qq", *options, "update"], "the lists of Debian's packages for arm64", apt / "packages")
    _run(["apt-get", "-qq", *options, "download", *DEBIAN_PACKAGES], "Debian 12's packages for arm64", apt / "packages")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for package in sorted((apt / "packages").glob("*.deb")):
        subprocess.run(["dpkg", "--extract", str(package), str(unfinished)], check=True)
    unfinished.rename(folder)


def needed_packages() -> list[str]:
    """Return the packages that this project needs on aarch64, each with the version that is installed here."""
    versions = {"torch": TORCH}
    names = ["oaiserve"]
    walked = set(names)
    while names:
        name = names.pop()
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            needed = canonicalize_name(requirement.name)
            environment = {"extra": "", "platform_machine": "aarch64"}
            if needed in walked or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            if name == "torch" and needed.startswith(("cuda-", "nvidia-", "triton")):  # if torch here is its CUDA build
                continue
            walked.add(needed)
            names.append(needed)
            versions.setdefault(needed, importlib.metadata.version(needed))
    return sorted(f"{name}=={version}" for name, version in versions.items())


def install(packages: Sequence[str], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in GLIBC_MINORS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += [
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        *platforms,
        "--platform=manylinux2014_aarch64",
    ]
    _run([*pip, f"--target={folder}", *packages], "wheels for aarch64", FOLDER)


def build_wheel(folder: Path) -> None:
    wheels = FOLDER / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    variables = {"CXX": COMPILER, "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", "PYTHONPATH": str(ROOT)}
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(build, check=True, cwd=ROOT, env=os.environ | variables)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def digest_of_sources() -> str:
    """Return the SHA-256 of all files that go into the wheel."""
    hashed = hashlib.sha256()
    for path in sorted((ROOT / "oaiserve").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            hashed.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


def _stamp(folder: Path) -> str | None:
    """Return the stamp of a finished folder, or None."""
    stamp = folder / ".made-of"
    return stamp.read_text() if stamp.is_file() else None


def _write_stamp(folder: Path, made_of: str) -> None:
    (folder / ".made-of").write_text(made_of)


def _run(arguments: Sequence[str], wanted: str, folder: Path) -> None:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        sys.exit(f"{arguments[0]} could not get {wanted}: {said[-1000:]}")
