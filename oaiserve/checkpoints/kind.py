"""The kind of a server: a digest of everything that determines the bytes of its answers."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from oaiserve.checkpoints import demo
from oaiserve.checkpoints.gguf import shard_paths

HEAD_BYTES = 64 * 1024  # start of each file; in weight files, it lists the names and offsets of all tensors
# The rest of a file is sampled at equal distances, because the weights of two training runs differ nearly everywhere.
SAMPLES = 256
SAMPLE_BYTES = 4096


def kind_of(model: str, settings: Iterable[object], mmproj: Path | None = None) -> str:
    """Return 16 hexadecimal digits that two servers share only if they have the same settings, libraries and model,
    judged by the sizes, first bytes and samples of the model's files. `mmproj` is the file that reads images for a GGUF
    file."""
    digest = sha256(repr([version("torch"), *settings]).encode())
    path = demo.fetched() if model == "demo" else Path(model)
    if path.is_dir():
        files = sorted(path.iterdir())
    elif path.is_file():
        files = shard_paths(path)
    else:
        files = []
    if mmproj is not None:
        files.append(mmproj)
    for file in (file for file in files if file.is_file()):
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode() + opened.read(HEAD_BYTES))
            for place in range(HEAD_BYTES, size, max(SAMPLE_BYTES, size // SAMPLES)):
                opened.seek(place)
                digest.update(opened.read(SAMPLE_BYTES))
    return sha256(digest.digest() + (b"" if files else model.encode())).hexdigest()[:16]
