"""The prebuilt libraries of an installed wheel, and the choice of the one for this machine's CPU.

An installation from sources has none. The libraries are next to the code that reads them, and a user who can change one
can change the other. So their folder's permissions are not checked, only that they are intact and were compiled from
the sources next to them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from pathlib import Path

from oaiserve.engine.executors.native.variants import (
    AMX_FEATURES,
    VARIANTS,
    Variant,
    is_sound,
    library_name,
    origin,
    origin_of,
)

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "lib"
CPUINFO = Path("/proc/cpuinfo")
LIMIT = "ATEN_CPU_CAPABILITY"  # torch's variable, which limits the native code, too
# The system call on x86-64 that requests permission for a part of a thread's state, here the tile registers of AMX.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_TILE_DATA = 18


@cache  # cached, so that a missing library is logged only once
def find(kind: str) -> Path | None:
    """Return the library of this kind for this CPU, or None. Log why the wheel's libraries can't be used."""
    if not FOLDER.is_dir():
        return None
    variant = fitting(platform.machine(), usable_features())
    if variant is None:
        return None
    path = FOLDER / library_name(kind, variant)
    if reason := _why_unusable(path, origin(kind, variant)):
        log.warning("The wheel's native code is not used: %s %s", path, reason)
        return None
    log.debug("The native code is the wheel's for %s", variant.name)
    return path


def fitting(machine: str, features: frozenset[str]) -> Variant | None:
    """Return the best variant for a CPU, or None after logging the CPU's missing features."""
    variants = [variant for variant in VARIANTS if variant.machine == machine]
    for variant in variants:
        if variant.features <= features:
            return variant
    if variants:
        lacks = ", ".join(sorted(variants[-1].features - features))
        log.warning("The wheel has no native code for this CPU, which lacks %s", lacks)
    else:
        log.warning("The wheel has no native code for %s", machine)
    return None


def usable_features() -> frozenset[str]:
    """Return the features of this machine's CPU, limited by LIMIT, and without AMX if the system refuses it."""
    features = cpu_features(CPUINFO)
    if is_limited():
        return frozenset(name for name in features if not name.startswith(("amx", "avx512")))
    if features >= AMX_FEATURES and _may_use_tiles():
        return features
    return features - AMX_FEATURES


def is_limited() -> bool:
    return os.environ.get(LIMIT) == "avx2"


@cache  # cached, because the answer holds for all threads and forked processes
def _may_use_tiles() -> bool:
    """Request the tile registers of AMX from Linux. If it refuses, as in some sandboxes, log so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0:
        return True
    log.warning("AMX is not used, because the system refuses its registers: %s", os.strerror(ctypes.get_errno()))
    return False


def cpu_features(cpuinfo: Path) -> frozenset[str]:
    """Return the features that all cores share, or none if the system doesn't report them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    cores = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    if cores:
        return frozenset.intersection(*(frozenset(core.split()) for core in cores))
    return frozenset()


def _why_unusable(path: Path, made_of: bytes) -> str | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "is missing: the wheel is not whole, or its native code is of other sources than these"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not is_sound(content):
        return "is damaged"
    if origin_of(content) != made_of:
        return "is of other sources than these"
    return None
