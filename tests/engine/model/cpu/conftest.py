"""Fixtures of tests of the native code: functions that tests call directly."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from oaiserve.engine.model.cpu import build


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile exports.cpp as a library and load it."""
    library = tmp_path_factory.mktemp("exports") / "exports.so"
    flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
    source = Path(__file__).parent / "exports.cpp"
    subprocess.run(["g++", *flags, f"-I{build.SOURCES}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
