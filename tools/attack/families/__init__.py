"""All attacks, by family. A family is a file."""

from __future__ import annotations

from importlib import import_module

from tools.attack.attack import ATTACKS as ATTACKS

FAMILIES = ("prompts", "framing", "forms", "grammars", "extremes", "readers", "crowds", "keys", "connections",
            "browsers", "signals")  # fmt: skip
for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
