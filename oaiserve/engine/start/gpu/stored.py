"""Stores what probes of GPUs found: for later starts, and for people who ask."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from oaiserve.engine.executors.cuda.product_ways import ProductWays
from oaiserve.engine.start.gpu.features import FEATURES, Probed
from oaiserve.storage import private

log = logging.getLogger(__name__)


def folder() -> Path:
    return private.cache_folder() / "probed-gpus"


def as_json(found: Probed) -> str:
    return json.dumps({**found._asdict(), "ways": found.ways._asdict(), "seconds": dict(found.seconds)})


def from_json(text: str | bytes) -> Probed:
    """Read what `as_json` wrote. Raises ValueError, TypeError and RecursionError for anything else."""
    match json.loads(text):
        case {"verdict": dict(verdict), "ways": dict(ways), "seconds": dict(seconds), "about": str(about)}:
            return Probed(verdict, ProductWays(**ways), seconds, about)
        case _:
            raise ValueError("this is not what a probe writes")


def recall(path: Path) -> Probed | None:
    """Read what a probe found. Return None if it is missing or broken."""
    try:
        private.verified(path.parent)
        found = from_json(private.read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, TypeError, ValueError, private.NotPrivate) as error:
        log.warning("The GPU is probed again, because what an earlier probe found cannot be used: %s", error)
        return None
    is_sound = found.verdict.keys() == FEATURES.keys()
    is_sound = is_sound and all(isinstance(reason, str) for reason in found.verdict.values())
    return found if is_sound else None


def remember(path: Path, found: Probed) -> None:
    """Write what a probe found, for later starts."""
    try:
        private.make_folder(path.parent)
        private.verified(path.parent)
        private.write_file(path, as_json(found).encode())
    except (OSError, private.NotPrivate) as error:
        log.warning("The next start probes the GPU again, because what was found could not be stored: %s", error)


def all_found() -> Iterator[Probed]:
    """Yield what the starts of this user have found, newest first."""
    try:
        paths = sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    for path in paths:
        if (found := recall(path)) is not None:
            yield found
