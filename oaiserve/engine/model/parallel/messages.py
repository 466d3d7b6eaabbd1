"""The messages between the server and its workers. Tensors are not part of them: they are broadcast in the group."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from oaiserve.config import EngineOptions


class Assignment(NamedTuple):
    """The first message to a worker: its shard of a model."""

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
    """The message to copy blocks."""

    blocks: list[tuple[int, int]]  # (from, to)


class TableChanges(NamedTuple):
    """The new entries in the block tables of all members: places in the flat tables, and blocks there."""

    places: list[int]
    blocks: list[int]


What = Literal["decodes", "prompts"]


class Capture(NamedTuple):
    """The message to capture the shards of a forward, at all members, for these sizes."""

    what: What
    sizes: list[int]


class Replay(NamedTuple):
    """The message to replay the graph of this size, in which the inputs are broadcast."""

    what: What
    size: int


Work = BatchShape | Copies | TableChanges | Capture | Replay


class Arrived(NamedTuple):
    """A worker has ended its imports, and is about to join the group."""


class Ready(NamedTuple):
    """A worker has loaded its shard of the model, and waits for work."""


class Logged(NamedTuple):
    """A worker has a log record, which the server logs."""

    level: int
    text: str


class WorkerFailed(NamedTuple):
    """A worker has failed and is about to end."""

    reason: str
    traceback: str | None  # None for a StartupError, whose message is enough for the user


Report = Arrived | Ready | Logged | WorkerFailed
