"""The machine and the version of this project that figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

COMMIT = "COMMIT"  # the file of an archive of the sources
_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the widest first


def sentence() -> str:
    """Describe the machine in a sentence."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    cpu = f"{fields.get('model name', platform.machine())}, family {fields.get('cpu family', '?')}"
    features = ", ".join(name for name in _FEATURES if name in fields.get("flags", "").split())
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{cpu} ({features}), {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, {platform.system()} "
        f"{platform.release()}; Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    )


def version() -> str:
    """Return the commit of this checkout, or of the archive that this is from."""
    if (packed := Path(__file__).parents[1] / COMMIT).exists():
        return packed.read_text()
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "of an unknown commit"
