"""Where files are kept that can be made or fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$OAISERVE_CACHE, else oaiserve/ in the user's cache."""
    if own := os.environ.get("OAISERVE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "oaiserve"
