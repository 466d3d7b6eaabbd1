"""The disk tier below the prefix cache: it writes blocks while steps run, and reads them when a prompt begins with
them.

A low-priority worker copies published blocks and writes them. Another worker reads blocks that a waiting sequence
lacks. The engine thread puts these into the prefix cache, where the sequence then finds them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from oaiserve.engine.sequences.blocks import BlockHash, BlockPool
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.tiers.lower_tier import BlocksArrived, MakeTier
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import WaitReason
from oaiserve.runtime import AT_ONCE, ENDED, Empty, Priority, Runtime, When, Worker
from oaiserve.storage.block_files import BlockFiles

log = logging.getLogger(__name__)

LEAST_READ = 64  # in tokens; it is faster to compute fewer than to read them
PIECE_BYTES = 4 << 20  # bytes that are copied to the cache at once, between two steps: takes some milliseconds
MOST_PIECES = 2  # maximum pieces between the reader and the engine thread
STOP_SECONDS = 5.0  # time limit for writing pending blocks at the end


class KeptBlocks(NamedTuple):
    """The files of blocks, and the blocks' location in memory."""

    files: BlockFiles
    arrays: list[np.ndarray]  # uint8 [number of blocks, bytes]: keys, values, ... of each layer


@dataclass(eq=False, slots=True)
class Reading:
    """Consecutive blocks that are being read. The blocks `before` them are in memory."""

    before: list[BlockHash]
    hashes: list[BlockHash]
    num_sent: int = 0  # number of hashes that the reader has finished
    is_over: bool = False  # set by the engine thread


class BlocksRead(NamedTuple):
    """The next blocks that were read, on their way to the engine thread."""

    reading: Reading
    hashes: list[BlockHash]
    rows: np.ndarray  # uint8 [blocks of a piece, bytes of a block]
    is_last: bool


class _ToWrite(NamedTuple):
    block: int
    allocation: int  # the block's allocation count; if it has changed, so has the block's content
    block_hash: BlockHash
    parent: BlockHash | None


class DiskTier:
    """Writes and reads the blocks of a pool. The engine thread calls all methods except `stop`.

    `arrived` is called on the reader's thread. It must make the engine thread call `take`.
    """

    reason = WaitReason.PREFIX_READ

    def __init__(
        self,
        storage: KeptBlocks,
        pool: BlockPool,
        arrived: Callable[[BlocksRead], None],
        runtime: Runtime,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._files, self._arrays = storage
        self._pool = pool
        self._arrived = arrived
        self._clock_ns = runtime.clock_ns
        ends = np.cumsum([array.shape[1] for array in self._arrays])
        self._places = [slice(end - array.shape[1], end) for end, array in zip(ends, self._arrays, strict=True)]
        self._block_bytes = int(ends[-1])
        self._piece = max(1, piece_bytes // self._block_bytes)  # number of blocks
        self.on_their_way: dict[BlockHash, Reading] = {}  # readings in progress, keyed by each of their hashes
        # Receives readings, and the rows of pieces that the engine thread has taken.
        self._reader: Worker[Reading | np.ndarray | None] = runtime.worker("read blocks", self._read)
        self._writer: Worker[_ToWrite | None] = runtime.worker("write blocks", self._write, priority=Priority.IDLE)
        self._is_stopping = False
        # Owned by the reader.
        self._readings: deque[Reading] = deque()  # The first one is under way.
        self._room = [np.empty((self._piece, self._block_bytes), np.uint8) for _ in range(MOST_PIECES)]
        self.num_read = self.num_written = self.num_skipped = 0  # blocks so far

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def stop(self) -> None:
        """End both workers, once pending blocks are written or after some seconds."""
        give_up_ns = self._clock_ns() + int(STOP_SECONDS * 1e9)
        self._is_stopping = True
        self._reader.post(None)
        self._writer.post(None)
        # The writer ends after its current block: at its priority, it would write nothing on a busy machine. There are
        # no more steps to delay, so this thread writes the rest.
        if self._writer.join(STOP_SECONDS):
            with suppress(Empty):
                while self._clock_ns() < give_up_ns:
                    if (job := self._writer.take()) is not None:
                        self._write_block(job)
        self._reader.join(max(0.0, (give_up_ns - self._clock_ns()) / 1e9))

    @property
    def held(self) -> list[int]:
        return []

    def serves(self, sequence: Sequence) -> bool:
        # The hash contains the adapter's number, which may belong to another adapter after a restart.
        return not sequence.adapter and not sequence.is_background

    def flush(self) -> None:
        """Do nothing: the writer reads blocks while steps run, and notices if a block has changed meanwhile."""

    def show(self, numbers: EngineNumbers) -> None:
        numbers.num_blocks_read = self.num_read
        numbers.num_blocks_written = self.num_written
        numbers.num_blocks_skipped = self.num_skipped

    def offer(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Queue a full and computed block for writing, unless it is on disk or the queue is full."""
        if block_hash in self._files:
            return
        if self._writer.num_waiting() < self._pool.num_blocks:  # A longer queue has blocks that were evicted.
            self._writer.post(_ToWrite(block, self._pool.allocations[block], block_hash, parent))
        else:
            self.num_skipped += 1

    def ask(self, sequence: Sequence, hashes: list[BlockHash], num_in_memory: int) -> BlockHash | None:
        """Return the hash of the block that a sequence has to wait for after its first blocks, or None.

        If further blocks are on disk, this starts reading them. That happens only once per sequence, because there may
        be no room for them.
        """
        missing = hashes[num_in_memory:]
        if missing and (under_way := self.on_their_way.get(missing[0])) is not None:
            return under_way.hashes[-1]
        if sequence.has_asked_tier:
            return None
        # A reading that started while the blocks before it were in memory may already include the later ones.
        on_disk = list(takewhile(lambda one: one in self._files and one not in self.on_their_way, missing))
        if len(on_disk) * self._pool.block_size < LEAST_READ:
            return None
        sequence.has_asked_tier = True
        reading = Reading(hashes[:num_in_memory], on_disk)
        self.on_their_way.update(dict.fromkeys(on_disk, reading))
        self._reader.post(reading)
        return on_disk[-1]

    def take(self, read: BlocksRead) -> BlockHash | None:
        """Put blocks into the prefix cache. Return the hash that was waited for if these were the last ones."""
        awaited = None if read.reading.is_over else self._put(read)
        self._reader.post(read.rows)
        return awaited

    def _put(self, read: BlocksRead) -> BlockHash | None:
        reading = read.reading
        pool = self._pool
        new = [(i, one) for i, one in enumerate(read.hashes) if pool.find(one) is None]
        # Blocks that are already in memory are referenced as well, so that they aren't evicted to make room.
        row = [*reading.before, *read.hashes]
        in_pool = [block for one in row if (block := pool.find(one)) is not None]
        blocks = pool.allocate(len(new), in_pool)
        if blocks is not None:
            added = blocks[len(in_pool) :]
            if len(new) == len(read.hashes):
                rows = read.rows[: len(new)]
            else:
                rows = read.rows[[i for i, _ in new]]
            for array, place in zip(self._arrays, self._places, strict=True):
                array[added] = rows[:, place]
            for block, (_, block_hash) in zip(added, new, strict=True):
                pool.publish(block, block_hash)
            pool.release(blocks)
            reading.before += read.hashes
            self.num_read += len(new)
        if blocks is not None and not read.is_last:
            return None
        reading.is_over = True
        for block_hash in reading.hashes:
            del self.on_their_way[block_hash]
        return reading.hashes[-1]

    def _read(self) -> When:
        """Read the next piece of the first reading, if there is a free buffer for it."""
        with suppress(Empty):
            while True:
                item = self._reader.take()
                if isinstance(item, Reading):
                    self._readings.append(item)
                elif item is not None:
                    self._room.append(item)
        if self._is_stopping:
            return ENDED
        if not self._readings or not self._room:
            return None
        reading = self._readings[0]
        if reading.num_sent == 0:
            self._files.use([*reading.before, *reading.hashes])
        is_last = reading.is_over or self._read_piece(reading)
        if is_last:
            self._readings.popleft()
        return AT_ONCE

    def _read_piece(self, reading: Reading) -> bool:
        """Read the next piece of a reading, and send it to the engine thread. Return whether it was the last piece."""
        rows = self._room.pop()
        hashes = reading.hashes[reading.num_sent : reading.num_sent + self._piece]
        num_good = 0
        try:
            while num_good < len(hashes) and self._files.read(hashes[num_good], rows[num_good].data):
                num_good += 1
        except Exception:  # Otherwise the waiting requests would never end.
            log.exception("Blocks of the prefix cache could not be read")
        reading.num_sent += len(hashes)
        is_last = num_good < len(hashes) or reading.num_sent >= len(reading.hashes)
        self._arrived(BlocksRead(reading, hashes[:num_good], rows, is_last))
        return is_last

    def _write(self) -> When:
        """Write the next block."""
        if self._is_stopping:
            return ENDED
        try:
            job = self._writer.take()
        except Empty:
            return None
        if job is not None:
            self._write_block(job)
        return AT_ONCE

    def _write_block(self, job: _ToWrite) -> None:
        content = np.concatenate([array[job.block] for array in self._arrays]).data
        # Steps have run meanwhile, so the block may have been reused.
        is_same = self._pool.allocations[job.block] == job.allocation
        if is_same and self._files.write(job.block_hash, job.parent or b"", content):
            self.num_written += 1
        else:
            self.num_skipped += 1


def disk_tier(storage: KeptBlocks) -> MakeTier:
    """Return a function that makes the disk tier of a pool."""

    def make(pool: BlockPool, post: Callable[[BlocksArrived], None], runtime: Runtime) -> DiskTier:
        tier = DiskTier(storage, pool, lambda read: post(BlocksArrived(partial(tier.take, read))), runtime)
        return tier

    return make
