"""Times in words, for explanations."""

from __future__ import annotations


def seconds(ns: float) -> str:
    """Return a time with three significant digits."""
    if ns < 999.5e6:
        return f"{ns / 1e6:.3g} ms"
    if ns < 999.5e9:
        return f"{ns / 1e9:.3g} s"
    return f"{ns / 1e9:.0f} s"
