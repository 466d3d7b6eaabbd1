"""The panels of dashboards, of which collapsed rows contain some."""

from collections.abc import Iterator
from typing import Any


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows and panels of a dashboard, in their order."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())
