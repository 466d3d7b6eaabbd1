"""The messages between the server and its workers. Tensors are not part of them: they are broadcast in the group."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from oaiserve.config import EngineOptions


class Task(NamedTuple):
    """The first message to a worker. It says which part of which model the worker holds."""

    rank: int
    folder: Path  # the argument of `group.join`
    model: str | Path
    offline: bool
    options: EngineOptions


class BatchShape(NamedTuple):
    """The lengths of a batch, see `Batch`. A broadcast of its tensors follows."""

    num_tokens: int
    table_width: int
    num_logits_rows: int
    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]


class Copies(NamedTuple):
    """The message that a worker has to copy blocks."""

    blocks: list[tuple[int, int]]  # (from, to)


Work = BatchShape | Copies


class Arrived(NamedTuple):
    """A worker has imported what it needs, and is about to join the group."""


class Ready(NamedTuple):
    """A worker has loaded its part of the model, and waits for work."""


class Logged(NamedTuple):
    """A worker has a log record, which the server logs."""

    level: int
    text: str


class WorkerFailed(NamedTuple):
    """A worker has failed and is about to end."""

    reason: str
    traceback: str | None  # None for a StartupError, whose message says what the user can do


Report = Arrived | Ready | Logged | WorkerFailed
