"""Refuses the pointers of Git LFS, which git leaves in place of large files. Stdlib only."""

from __future__ import annotations

from pathlib import Path

from oaiserve.files.metadata_limits import BadFile

_BEGINS = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raise BadFile if a file is a pointer of Git LFS, as in a repository cloned without it."""
    with path.open("rb") as file:
        if file.read(len(_BEGINS)) == _BEGINS:
            raise BadFile("it is only a pointer of Git LFS; 'git lfs pull' in its folder fetches the file itself")
