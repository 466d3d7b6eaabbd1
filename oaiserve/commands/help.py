"""The form of --help: no flag is broken across lines, and `serve --help` shows the flags that most people use."""

from __future__ import annotations

import math
import re
from collections.abc import Set as AbstractSet
from typing import Any

from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, HelpEntry, HelpPanel, NameRenderer

_NEXT_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z0-9])")
_FLAGS_SHARE = 0.35  # share of the width


class HelpFormatter(DefaultFormatter):
    """Prints flags in a column that is as wide as the longest of their words."""

    def __init__(self, only: AbstractSet[str] | None = None) -> None:
        """Show only the flags in `only`, each with the first sentence of its text. None: show all of them in full."""
        super().__init__()
        self._only = only

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        if self._only is not None:
            shown = (each for each in panel.entries if each.positional_label or not self._only.isdisjoint(each.names))
            panel = panel.copy(entries=[_short(entry) for entry in shown])
        if panel.format == "parameter":
            panel = panel.copy(entries=[_with_one_value(entry) for entry in panel.entries])
            self.column_specs = _columns(console.width, panel.entries)
        else:
            self.column_specs = None
        super().__call__(console, options, panel)


def _short(entry: HelpEntry) -> HelpEntry:
    text = " ".join(entry.description.primary_renderable.markup.split())
    return entry.copy(description=_NEXT_SENTENCE.split(text)[0])


def _with_one_value(entry: HelpEntry) -> HelpEntry:
    """Show a repeatable flag with the one value that it takes: a second word after it would be a model to serve."""
    if entry.positional_label or not entry.metavar:
        return entry
    return entry.copy(metavar=entry.metavar.removesuffix("..."))


def _columns(width: int, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    words = [word for entry in entries for label in entry.display_labels_with_metavar for word in label.split()]
    names = max([math.ceil(width * _FLAGS_SHARE), *map(len, words)])
    return (
        ColumnSpec(renderer=NameRenderer(max_width=names), style="cyclopts.name", max_width=names),
        ColumnSpec(renderer=DescriptionRenderer(), overflow="fold"),
    )
