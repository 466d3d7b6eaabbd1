"""Runs the parts of a section one after the other: one that fails is reported, and the others go on."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

Found = dict[str, Any]
Part = Callable[[], Iterator[Found]]
LAST_LINES = 6


def in_turn(parts: Mapping[str, Part]) -> Iterator[Found]:
    """Yield what the parts find, and `problems` by part as they come."""
    problems: dict[str, str] = {}
    for name, part in parts.items():
        try:
            yield from part()
        except Exception as error:  # A device can raise anything, and the other parts may still be measured.
            log.exception("%s failed", name)
            problems[name] = "\n".join("".join(traceback.format_exception(error)).splitlines()[-LAST_LINES:])
            yield {"problems": dict(problems)}
