"""Measures the engine thread's time to launch a step of a model that is split in two, without what the device does.

The other member is a process that gets the messages and agrees, as a worker does. Left out is what a host spends on a
GPU's driver: a broadcast, and the launches of all layers, or of two graphs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.decode_forwards import DecodeForwards, Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.capacity import Capacity
from oaiserve.engine.model.parallel.executor import ParallelExecutor
from oaiserve.engine.model.parallel.messages import Capture, Replay, TableChanges, What, Work
from oaiserve.engine.model.parallel.shard import Shard
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.step import Chunk, Step
from oaiserve.facts.times import monotonic_ns
from tools.host_doubles import BLOCK_SIZE, NoSampler, make_sequence, make_spec


class Logits:
    """An executor that computes nothing."""

    is_exact = False

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._logits[: len(batch.logits_rows)]

    def replay(self, size: int) -> None:
        """Replay nothing."""


class Workers:
    """The messages to the other member."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, work: Work) -> None:
        self._connection.send_bytes(ForkingPickler.dumps(work))

    def explained(self) -> nullcontext[None]:
        return nullcontext()


def make_tables(spec: ModelSpec, num_sequences: int, **tell: Any) -> BlockTables:
    return BlockTables(num_sequences, spec.max_model_len // BLOCK_SIZE, BLOCK_SIZE, spec.device, **tell)


def other_member(connection: Connection[Any, Any], folder: Path, num_sequences: int) -> None:
    """Do what the first member sends, until it sends None."""
    spec = make_spec()
    dist.broadcast = lambda tensor, src: tensor.zero_()
    with group.environment(1):
        group.join(1, 2, spec.device, folder, 2)
    executor = Logits(torch.zeros(num_sequences, spec.vocab_size))
    part = Shard(executor, Capacity(), make_tables(spec, num_sequences), lambda _: executor)  # type: ignore[arg-type]
    while (work := connection.recv()) is not None:
        part.do(work)


@contextmanager
def two_members(num_sequences: int) -> Iterator[Workers]:
    """Start the other member, and yield the messages to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    broadcast = dist.broadcast
    with tempfile.TemporaryDirectory() as folder:
        other = context.Process(target=other_member, args=(theirs, Path(folder), num_sequences))
        other.start()
        try:
            with group.environment(0):
                group.join(0, 2, torch.device("cpu"), Path(folder), 2)
            dist.broadcast = lambda tensor, src: None
            yield Workers(ours)  # type: ignore[arg-type]
        finally:
            dist.broadcast = broadcast
            ours.send(None)
            other.join()
            group.leave(broken=False)


def launch_us(num_sequences: int, length: int, *, replays: bool, num_steps: int) -> float:
    """Return the median time to launch a step in which sequences of this length decode."""
    spec = make_spec()
    executor = Logits(torch.zeros(num_sequences, spec.vocab_size))
    with two_members(num_sequences) as workers:
        tables = make_tables(
            spec, num_sequences, tell=lambda places, blocks: workers.send(TableChanges(places, blocks))
        )
        parallel = ParallelExecutor(executor, workers, Capacity(), tables)  # type: ignore[arg-type]
        graphs: DecodeGraphs | None = None
        if replays:
            workers.send(Capture("decodes", [num_sequences]))
            graphs = _graphs(executor, spec, tables, workers, num_sequences)
        runner = ModelRunner(
            parallel, spec.device, BLOCK_SIZE, sample_ids=_drawn, graphs=graphs, tables=tables, check_results=_nothing
        )
        running = [make_sequence(length, length + num_steps + 1) for _ in range(num_sequences)]
        times_us = []
        for number in range(num_steps):
            step = Step([Chunk(one, length + number, 1) for one in running])
            began_ns = monotonic_ns()
            runner.launch(step)
            times_us.append((monotonic_ns() - began_ns) / 1e3)
    return statistics.median(times_us[2:])


def _graphs(
    executor: Logits, spec: ModelSpec, tables: BlockTables, workers: Workers, num_sequences: int
) -> DecodeGraphs:
    def replay(size: int, run: Run) -> None:
        what: What = "decodes"
        workers.send(Replay(what, size))
        run()

    forwards = DecodeForwards(
        executor.forward, _capture, spec, tables, sizes=[num_sequences], max_model_len=spec.max_model_len
    )
    return DecodeGraphs(forwards, NoSampler(), _capture, block_size=BLOCK_SIZE, replay=replay)


def _capture(run: Run) -> Run:
    run()
    return lambda: None


def _drawn(logits: torch.Tensor, rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(len(rows), dtype=torch.int64), torch.ones(len(rows), dtype=torch.bool)


def _nothing() -> None:
    """Check nothing."""
