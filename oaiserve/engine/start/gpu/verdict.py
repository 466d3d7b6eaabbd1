"""Stores the verdict of a probe, which faster ways to compute are usable on this GPU, for later starts.

A file is valid for one model, one GPU, its driver, and the versions of the packages that make kernels. Stdlib only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from oaiserve.files import private

log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")


class Verdict(NamedTuple):
    """The reasons why features are off, by name. A feature that is on has an empty text; a missing one was not
    tried."""

    off: Mapping[str, str] = MappingProxyType({})
    problems: frozenset[str] = frozenset()  # the features that are off because they failed


def verdict_path(about: Iterable[str]) -> Path:
    """Return the path of the verdict that depends on these."""
    name = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    return private.cache_folder() / "probed-gpus" / name


def driver_version() -> str:
    """Return a line with the version of NVIDIA's driver, or an empty one if the system has none."""
    try:
        return _DRIVER.read_text().partition("\n")[0]
    except OSError:
        return ""


def recall(path: Path) -> Verdict | None:
    """Read a verdict. Return None if it is missing or broken."""
    try:
        private.verified(path.parent)
        found = json.loads(private.read_file(path))
        off = found["off"]
        problems = frozenset(found["problems"])
    except FileNotFoundError:
        return None
    except (KeyError, OSError, RecursionError, TypeError, ValueError, private.NotPrivate) as error:
        log.warning("The GPU is probed again, because the verdict of an earlier probe cannot be used: %s", error)
        return None
    is_sound = isinstance(off, dict) and all(isinstance(reason, str) for reason in off.values())
    return Verdict(off, problems) if is_sound else None


def remember(path: Path, verdict: Verdict) -> bool:
    """Write a verdict. Return whether later starts will find it."""
    content = {"off": dict(verdict.off), "problems": sorted(verdict.problems)}
    try:
        private.make_folder(path.parent)
        private.verified(path.parent)
        private.write_file(path, json.dumps(content).encode())
    except (OSError, private.NotPrivate) as error:
        log.warning("The next start probes the GPU again, because the verdict could not be stored: %s", error)
        return False
    return True
