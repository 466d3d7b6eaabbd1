"""Describes the machine that the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the widest first


def sentence() -> str:
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
