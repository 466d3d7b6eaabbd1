"""What the server and its workers tell each other, beside tensors."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from oaiserve.config import EngineOptions


class Task(NamedTuple):
    """What a worker is to be; the first that it is told."""

    rank: int
    folder: Path  # where members meet
    model: str | Path
    offline: bool
    options: EngineOptions


class Shape(NamedTuple):
    """Of a batch, which follows as a broadcast of its tensors. See Batch."""

    num_tokens: int
    table_width: int
    num_logits_rows: int
    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]


class Copies(NamedTuple):
    """Blocks to copy: (from, to)."""

    blocks: list[tuple[int, int]]


Work = Shape | Copies


class Arrived(NamedTuple):
    """A worker has imported what it needs, and comes to meet the others next."""


class Ready(NamedTuple):
    """A worker has loaded its part, and waits for work."""


class Logged(NamedTuple):
    level: int
    text: str


class Failed(NamedTuple):
    """A worker's last words."""

    reason: str
    traceback: str | None  # None where the user can put it right


Report = Arrived | Ready | Logged | Failed
