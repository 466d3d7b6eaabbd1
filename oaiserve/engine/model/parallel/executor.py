"""The steps of a tensor-parallel model: the server sends each batch to the workers, and all members compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import ALIGNMENT, Batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.decode_forwards import DecodeForwards
from oaiserve.engine.model.gpu.device_memory import CudaMemory
from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.messages import BatchShape, Capture, Copies, Replay, TableChanges, What, Work
from oaiserve.engine.model.parallel.workers import Workers
from oaiserve.engine.model.spec import ModelSpec

ALWAYS_BYTES = 64 << 20  # lists and partial results, for any number of tokens
# The tensors of a batch that the server sends, in this order.
_SENT = ("input_ids", "positions", "slots", "table_rows", "query_start", "seq_lens", "logits_rows")


class Needs(NamedTuple):
    """Upper bounds of the memory of a member's work, in bytes."""

    of_token: int
    of_logits_row: int
    of_block: int  # that is copied

    @classmethod
    def of_model(cls, spec: ModelSpec, block_size: int, *, largest_step_bytes: int, max_step_tokens: int) -> Needs:
        """Return the needs of a model, by its measured largest step."""
        widest = max((shape.num_bytes(spec.dtype) for shape in spec.kv_shapes.values()), default=0)
        return cls(
            of_token=-(-largest_step_bytes // max_step_tokens),
            of_logits_row=2 * spec.vocab_size * spec.dtype.itemsize,  # this member's part, and the whole
            of_block=widest * block_size,
        )


class Capacity:
    """The memory of this member. The members agree before each piece of work whether it fits into that of all: one
    without memory in the middle would leave the others waiting for its part of a sum.

    Without `memory`, on a CPU, all work fits: the system gives memory page by page.
    """

    def __init__(self, memory: CudaMemory | None = None, needs: Needs | None = None) -> None:
        self._memory, self._needs = memory, needs

    def agreed(self, work: Copies | BatchShape) -> bool:
        """Return whether this work fits at all members. Blocks until all have called it."""
        return group.all_agree(self.is_here(work))

    def is_here(self, work: Copies | BatchShape) -> bool:
        """Return whether it fits into this member's memory."""
        if self._memory is None or self._needs is None:
            return True
        needs = self._needs
        if isinstance(work, Copies):
            return self._memory.fits(ALWAYS_BYTES + len(work.blocks) * needs.of_block)
        rows_bytes = work.num_logits_rows * needs.of_logits_row
        return self._memory.fits(ALWAYS_BYTES + work.num_tokens * needs.of_token + rows_bytes)


class ParallelExecutor:
    """Computes the server's shard with `own` while the workers compute theirs. All have the same number of blocks.

    `tables` are the same at all members, and each batch reads them.
    """

    is_exact = False

    def __init__(self, own: Executor, workers: Workers, capacity: Capacity, tables: BlockTables) -> None:
        self._own, self._workers, self._capacity, self._tables = own, workers, capacity, tables

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch. Raises torch.OutOfMemoryError, before anything begins, if it does not fit at a member."""
        assert batch.block_tables is self._tables.on_device
        tensor, lengths = packed(batch), (len(batch.input_ids), len(batch.logits_rows))
        self._begin(BatchShape(*lengths, batch.num_decodes, batch.query_lens, batch.context_lens))
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


def packed(batch: Batch) -> torch.Tensor:
    """Return a batch's inputs, without the block tables, as one int64 tensor, which `received` unpacks."""
    filler = batch.input_ids.new_zeros(ALIGNMENT)
    tensors = [getattr(batch, name) for name in _SENT]
    return torch.cat([part for tensor in tensors for part in (tensor, filler[: -len(tensor) % ALIGNMENT])])


def received(shape: BatchShape, tables: torch.Tensor) -> Batch:
    """Receive the server's broadcast of a batch with the lengths `shape`. The batch reads `tables`."""
    num_sequences = len(shape.query_lens)
    lengths = [*[shape.num_tokens] * 3, num_sequences, num_sequences + 1, num_sequences, shape.num_logits_rows]
    sizes = [size for length in lengths for size in (length, -length % ALIGNMENT)]
    tensor = torch.empty(sum(sizes), dtype=torch.int64, device=tables.device)
    dist.broadcast(tensor, src=0)
    return Batch(
        **dict(zip(_SENT, tensor.split(sizes)[::2], strict=True)),
        block_tables=tables,
        num_decodes=shape.num_decodes,
        query_lens=shape.query_lens,
        context_lens=shape.context_lens,
    )


class Shard:
    """A worker's shard of the model, which obeys the server's messages, on block tables like the server's.

    `capture` returns None if any member has failed.
    """

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        tables: BlockTables,
        capture: Callable[[Capture], DecodeForwards | PromptGraphs | None],
    ) -> None:
        self._executor, self._capacity, self._tables, self._capture = executor, capacity, tables, capture
        self._captured: dict[What, DecodeForwards | PromptGraphs | None] = {}

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
