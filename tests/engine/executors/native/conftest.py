"""Fixtures of tests of the native code: functions that tests call directly, and a script in place of the compiler."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from oaiserve.engine.executors.native import build
from tests.engine.executors.native.compiled import HERE, compiled


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that makes a script the compiler, and an empty cache for its libraries.

    The last argument of the script, `$out`, is the file to write. calls.txt gets the arguments of each call.
    """
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))

    def write(script: str) -> Path:
        path = tmp_path / "fake-g++"
        path.write_text(
            f'#!/bin/sh\nfor out; do :; done\nif [ "$out" = --version ]; then echo fake 1.0; exit; fi\n'
            f'echo "$@" >> {tmp_path}/calls.txt\n{script}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def exports() -> ctypes.CDLL:
    """Compile exports.cpp as a library and load it."""
    flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
    return ctypes.CDLL(str(compiled("g++", flags, HERE / "exports.cpp")))
