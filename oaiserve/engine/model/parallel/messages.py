"""The messages between the server and its workers. Tensors travel apart from them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from oaiserve.config import EngineOptions


class Task(NamedTuple):
    """The first message to a worker: which part of which model it holds."""

    rank: int
    folder: Path  # where members meet
    model: str | Path
    offline: bool
    options: EngineOptions


class BatchShape(NamedTuple):
    """The lengths of a batch, see Batch. A broadcast of its tensors follows."""

    num_tokens: int
    table_width: int
    num_logits_rows: int
    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]


class Copies(NamedTuple):
    """The message that blocks are to be copied."""

    blocks: list[tuple[int, int]]  # (from, to)


Work = BatchShape | Copies


class Arrived(NamedTuple):
    """A worker has imported what it needs, and is about to join the group."""


class Ready(NamedTuple):
    """A worker has loaded its part of the model, and waits for work."""


class Logged(NamedTuple):
    """A worker has something to log, which the server logs."""

    level: int
    text: str


class WorkerFailed(NamedTuple):
    """A worker has failed and is about to end."""

    reason: str
    traceback: str | None  # None where the reason is enough for the user to correct it


Report = Arrived | Ready | Logged | WorkerFailed
