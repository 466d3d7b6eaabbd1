"""The messages between the server and its workers. Tensors are not part of them: they are broadcast in the group."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from oaiserve.config import EngineOptions


class Assignment(NamedTuple):
    """The first message to a worker. It says which part of which model the worker holds."""

    rank: int
    folder: Path  # the argument of `group.join`
    model: str | Path
    options: EngineOptions


class BatchShape(NamedTuple):
    """The lengths of a batch, see `Batch`. A broadcast of its tensors follows."""

    num_tokens: int
    num_logits_rows: int
    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]


class Copies(NamedTuple):
    """The message that a worker has to copy blocks."""

    blocks: list[tuple[int, int]]  # (from, to)


class TableChanges(NamedTuple):
    """TableChanges has what is new in the block tables of all members: places in the flat tables, and blocks there."""

    places: list[int]
    blocks: list[int]


What = Literal["decodes", "prompts"]


class Capture(NamedTuple):
    """All members capture their parts of the forward now, for these sizes."""

    what: What
    sizes: list[int]


class Replay(NamedTuple):
    """A worker has to replay what it has captured for this size. A broadcast of the inputs is a part of that."""

    what: What
    size: int


Work = BatchShape | Copies | TableChanges | Capture | Replay


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
