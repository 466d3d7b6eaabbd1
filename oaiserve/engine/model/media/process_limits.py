"""Limits on what a process may use."""

from __future__ import annotations

import resource
from contextlib import suppress


def limit(kind: int, most: int) -> None:
    """Limit a resource of this process, such as RLIMIT_CPU, to `most` or to what its user may have, if that is less."""
    _, allowed = resource.getrlimit(kind)
    wanted = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    with suppress(ValueError):  # macOS takes no limit of the address space
        resource.setrlimit(kind, (wanted, allowed))
