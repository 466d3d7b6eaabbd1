"""Limits on what a process that decodes media may use."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

NICENESS = 5  # A core that the model needs as well is shared with it 1 to 3.


def yield_to_the_model() -> None:
    """Give this process less of a core than the model's threads."""
    os.nice(NICENESS)


def limit(kind: int, most: int) -> None:
    """Limit a resource of this process, such as RLIMIT_CPU, to `most` or to what its user may have, if that is less."""
    _, allowed = resource.getrlimit(kind)
    wanted = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    with suppress(ValueError):  # macOS takes no limit of the address space
        resource.setrlimit(kind, (wanted, allowed))
