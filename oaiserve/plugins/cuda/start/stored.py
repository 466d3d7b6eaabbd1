"""Stores the results of GPU probes, for later starts and for `oaiserve doctor`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from oaiserve.plugins.cuda.start.features import FEATURES, Probed
from oaiserve.storage import private

log = logging.getLogger(__name__)


def folder() -> Path:
    return private.cache_folder() / "probed-gpus"


def recall(path: Path) -> Probed | None:
    """Return the result of a probe, or None if it is missing, corrupt, or of another version or user."""
    try:
        found = msgspec.json.decode(private.read_file(private.verified(path.parent) / path.name), type=Probed)
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError, private.NotPrivate) as error:
        log.warning("What an earlier probe of the GPU found cannot be used: %s", error)
        return None
    return found if found.verdict.keys() == FEATURES.keys() else None


def remember(path: Path, found: Probed) -> None:
    """Store the result of a probe for later starts."""
    try:
        private.make_folder(path.parent)
        private.verified(path.parent)
        private.write_file(path, msgspec.json.encode(found))
    except (OSError, private.NotPrivate) as error:
        log.warning("The next start probes the GPU again, because what was found could not be stored: %s", error)


def all_found() -> Iterator[Probed]:
    """Yield the results of this user's starts, newest first."""
    with suppress(OSError):
        paths = sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        yield from filter(None, map(recall, paths))
