"""Shows what takes over two seconds: how far it is, of how much, and how long it will take yet.

A terminal has a bar, which vanishes at the end; all else gets a line each five seconds. The bars are tqdm's, since the
hub's client and transformers count with tqdm. A level of this module's logger above INFO hides them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

SILENT_SECONDS, LINE_SECONDS = 2.0, 5.0


class Progress(tqdm):  # type: ignore[misc]
    """A bar, which libraries may make where they would make tqdm's."""

    monitor_interval = 0  # no thread that stays

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._is_terminal = sys.stderr.isatty()
        between_seconds = 0.1 if self._is_terminal else LINE_SECONDS
        ours: dict[str, Any] = {"delay": SILENT_SECONDS, "mininterval": between_seconds, "miniters": 1, "leave": False}
        ours |= {"dynamic_ncols": self._is_terminal, "file": sys.stderr, "disable": log.level > logging.INFO}
        super().__init__(*arguments, **named | ours)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._is_terminal:
            super().display(msg, pos)
        elif msg is None and self.n:  # "" clears a line
            print(self, file=sys.stderr, flush=True)

    def clear(self, nolock: bool = False) -> None:
        if self._is_terminal:
            super().clear(nolock)


def show_transformers_progress() -> None:
    """Have transformers make these bars."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as bars

    bars.set_tqdm_hook(lambda factory, arguments, named: Progress(*arguments, **named))
    modeling_gguf_pytorch_utils.tqdm = Progress


def counted(doing: str, names: Collection[str], num_bytes: Callable[[str], int]) -> Iterator[str]:
    """Yield names, and show how many bytes of what they are names of are done."""
    sizes = {name: num_bytes(name) for name in names}
    with Progress(desc=doing, total=sum(sizes.values()), unit="B", unit_scale=True) as bar:
        for name, size in sizes.items():
            yield name
            bar.update(size)
