"""Stores what probes of GPUs found: for later starts, and for people who ask."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from oaiserve.engine.start.gpu.features import FEATURES, Probed
from oaiserve.storage import private

log = logging.getLogger(__name__)


def folder() -> Path:
    return private.cache_folder() / "probed-gpus"


def recall(path: Path) -> Probed | None:
    """Read what a probe found. Return None if it is missing or broken."""
    try:
        private.verified(path.parent)
        found = _read(path)
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError, private.NotPrivate) as error:
        log.warning("The GPU is probed again, because what an earlier probe found cannot be used: %s", error)
        return None
    return found if found.verdict.keys() == FEATURES.keys() else None


def _read(path: Path) -> Probed:
    """Read a file. Raises OSError and NotPrivate, and for what `remember` doesn't write ValueError and
    RecursionError."""
    return msgspec.json.decode(private.read_file(path), type=Probed)


def remember(path: Path, found: Probed) -> None:
    """Write what a probe found, for later starts."""
    try:
        private.make_folder(path.parent)
        private.verified(path.parent)
        private.write_file(path, msgspec.json.encode(found))
    except (OSError, private.NotPrivate) as error:
        log.warning("The next start probes the GPU again, because what was found could not be stored: %s", error)


def all_found() -> Iterator[Probed]:
    """Yield what the starts of this user have found, newest first."""
    try:
        private.verified(folder())
        paths = sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except (OSError, private.NotPrivate):
        return
    for path in paths:
        with suppress(OSError, RecursionError, ValueError, private.NotPrivate):  # It may be of another version.
            yield _read(path)
