"""A worker's shard of a tensor-parallel model, which obeys the server's messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.parallel.capacity import Capacity
from oaiserve.engine.model.parallel.executor import received
from oaiserve.engine.model.parallel.messages import BatchShape, Capture, Copies, Replay, TableChanges, What, Work


class Captured(Protocol):
    """The captured forwards of a member."""

    def replay(self, size: int) -> None: ...


class Shard:
    """Computes with `executor`, on block tables like the server's. `capture` returns None if any member has failed."""

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        tables: BlockTables,
        capture: Callable[[Capture], Captured | None],
    ) -> None:
        self._executor = executor
        self._capacity = capacity
        self._tables = tables
        self._capture = capture
        self._captured: dict[What, Captured | None] = {}

    def do(self, work: Work) -> None:
        """Do a piece of work, at the same time as all other members."""
        match work:
            case TableChanges(places, blocks):
                self._tables.write(places, blocks)
            case Capture(what):
                self._captured[what] = self._capture(work)
            case Replay(what, size):
                # It fits: it has had all its memory since its capture.
                captured = self._captured[what]
                assert captured is not None
                captured.replay(size)
            case Copies(blocks):
                if self._capacity.agreed(work):
                    self._executor.copy_blocks(blocks)
            case BatchShape():
                if self._capacity.agreed(work):
                    self._executor.forward(received(work, self._tables.on_device))
