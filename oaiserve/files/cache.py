"""The cache folder holds files that can be made or downloaded again: the demo model and compiled native code."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $OAISERVE_CACHE if it is set, else the folder `oaiserve` in the user's cache folder."""
    if own := os.environ.get("OAISERVE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "oaiserve"
