"""Fixtures of tests of the native code: functions that tests call directly, and a cache of their own."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from oaiserve.engine.model.cpu import build


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a cache that is empty, apart from the library for float32. Return it."""
    libraries = build.build(torch.float32).parent
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "native").symlink_to(libraries)
    monkeypatch.setenv("OAISERVE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile exports.cpp as a library and load it."""
    library = tmp_path_factory.mktemp("exports") / "exports.so"
    flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
    source = Path(__file__).parent / "exports.cpp"
    subprocess.run(["g++", *flags, f"-I{build.SOURCES}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
