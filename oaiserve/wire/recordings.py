"""The form of recordings (`serve --record-requests`). The server writes them, and the load test and tools
read them.

A recording is JSON lines. The first line has the version, the size of blocks and the server's settings. The others are
prompts, with the fields that docs/loadtest.md lists, and now and then the estimated cost of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = 1
BLOCK_TOKENS = 64
HASH_BYTES = 5  # bytes of a block's hash; of a million different blocks, two collide in every second recording


def head(server: Mapping[str, Any]) -> dict[str, Any]:
    return {"recording": VERSION, "block_tokens": BLOCK_TOKENS, "server": dict(server)}


def is_recording(first_row: Mapping[str, Any]) -> bool:
    """Return whether a file is a recording, from its first row. Raises ValueError if it is of another version."""
    version = first_row.get("recording")
    if version not in (None, VERSION):
        raise ValueError(f"it is a recording of version {version}, but this reads version {VERSION}")
    return version is not None


def block_hashes(row: Mapping[str, Any]) -> list[str]:
    """Return the hash of each whole block of a row's prompt, in hexadecimal digits."""
    digits = 2 * HASH_BYTES
    hashes = row["blocks"]
    return [hashes[start : start + digits] for start in range(0, len(hashes), digits)]
