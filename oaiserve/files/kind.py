"""The kind of a server: a digest of all that the bytes of its answers depend on."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from oaiserve.files import demo

HEAD_BYTES = 64 * 1024  # of each file; of weights, they have the names and the places of all tensors


def kind_of(model: str, settings: Iterable[object]) -> str:
    """Return 16 hexadecimal digits, which two servers have in common only if they have the same model, by the sizes
    and the first bytes of its files, the same settings and the same libraries."""
    found = sha256(repr([version("torch"), *settings]).encode())
    path = demo.fetched() if model == "demo" else Path(model)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    for file in (file for file in files if file.is_file()):
        with file.open("rb") as opened:
            found.update(f"{file.name} {file.stat().st_size} ".encode() + opened.read(HEAD_BYTES))
    return sha256(found.digest() + (b"" if files else model.encode())).hexdigest()[:16]
