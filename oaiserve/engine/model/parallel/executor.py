"""The executor of a tensor-parallel model: it sends each batch to the workers, and all members compute it together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import ALIGNMENT, Batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.parallel.capacity import Capacity
from oaiserve.engine.model.parallel.messages import BatchShape, Copies
from oaiserve.engine.model.parallel.workers import Workers


class ParallelExecutor:
    """Computes the server's shard with `own` while the workers compute theirs. All have the same number of blocks.

    `tables` are the same at all members, and each batch reads them.
    """

    is_exact = False

    def __init__(self, own: Executor, workers: Workers, capacity: Capacity, tables: BlockTables) -> None:
        self._own = own
        self._workers = workers
        self._capacity = capacity
        self._tables = tables

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch. Raises torch.OutOfMemoryError, before anything is computed, if it does not fit at a
        member."""
        assert batch.block_tables is self._tables.on_device
        tensor = packed(batch)
        self._begin(shape_of(batch))
        with self._in_step():
            # On a GPU the host does not wait for the broadcast. It follows the work that draws the ids it contains.
            dist.broadcast(tensor, src=0)
            return self._own.forward(batch)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._begin(Copies(list(copies)))
        with self._in_step():
            self._own.copy_blocks(copies)

    def _begin(self, work: Copies | BatchShape) -> None:
        """Send work to all workers, which begin it if it fits at all members."""
        with self._workers.explained():
            self._workers.send(work)
            has_room = self._capacity.agreed(work)
        if not has_room:
            raise torch.OutOfMemoryError("a member of the model that is split has no room for it")

    def prepare(self, adapter: Adapter) -> Adapter:
        """Raise NotImplementedError: a tensor-parallel model has no adapters, and the options do not allow any."""
        raise NotImplementedError

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            with self._workers.explained():
                yield
        except torch.OutOfMemoryError as error:
            # It took more than was expected, and cannot be repeated: the workers are waiting for this member's part.
            raise RuntimeError(f"No memory for a step of a model that is split over devices: {error}") from error


def shape_of(batch: Batch) -> BatchShape:
    """Return the lengths of a batch, by which a worker receives its tensors."""
    return BatchShape(
        num_tokens=len(batch.input_ids),
        num_logits_rows=len(batch.logits_rows),
        num_decodes=batch.num_decodes,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
    )


def packed(batch: Batch) -> torch.Tensor:
    """Return the model's inputs of a batch, without the block tables, as one int64 tensor on its device.

    `received` unpacks it.
    """
    filler = batch.input_ids.new_zeros(ALIGNMENT)
    parts = []
    for tensor in (
        batch.input_ids,
        batch.positions,
        batch.slots,
        batch.table_rows,
        batch.query_start,
        batch.seq_lens,
        batch.logits_rows,
    ):
        parts += [tensor, filler[: -len(tensor) % ALIGNMENT]]
    return torch.cat(parts)


def received(shape: BatchShape, tables: torch.Tensor) -> Batch:
    """Receive the server's broadcast of a batch with the lengths `shape`. The batch reads `tables`."""
    num_tokens, num_sequences = shape.num_tokens, len(shape.query_lens)
    lengths = [
        *(num_tokens, num_tokens, num_tokens),
        num_sequences,
        num_sequences + 1,
        num_sequences,
        shape.num_logits_rows,
    ]
    sizes = [size for length in lengths for size in (length, -length % ALIGNMENT)]
    tensor = torch.empty(sum(sizes), dtype=torch.int64, device=tables.device)
    dist.broadcast(tensor, src=0)
    input_ids, positions, slots, table_rows, query_start, seq_lens, logits_rows = tensor.split(sizes)[::2]
    none = tensor[:0]
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        block_tables=tables,
        table_rows=table_rows,
        query_start=query_start,
        seq_lens=seq_lens,
        logits_rows=logits_rows,
        unknown_rows=none,
        drawn_rows=none,
        num_decodes=shape.num_decodes,
        query_lens=shape.query_lens,
        context_lens=shape.context_lens,
        sample_chunks=[],
        prompt_rows=[],
    )
