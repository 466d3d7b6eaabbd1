"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the widest first


def describe() -> dict[str, str | int | float]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return {
        "cpu": f"{fields.get('model name', platform.machine())}, family {fields.get('cpu family', '?')}",
        "features": ", ".join(name for name in _FEATURES if name in flags),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def sentence() -> str:
    it = describe()
    return (
        f"{it['cpu']} ({it['features']}), {it['cores']} cores, {it['memory_gib']:.0f} GiB, {it['system']}; "
        f"Python {it['python']}, torch {it['torch']}"
    )
