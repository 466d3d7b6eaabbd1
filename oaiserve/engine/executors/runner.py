"""The model runner: builds the batch of a step, passes it to an executor, and samples.

Steps are computed one by one on one stream, so each step sees everything that earlier steps have written.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.replay import PendingDraws, Replays, SequenceTables, TokenCounts
from oaiserve.engine.model.sampling.sampled_ids import SampledIds
from oaiserve.engine.model.sampling.sampler import Sampling, take
from oaiserve.engine.model.states import KeptStates, StateChunk
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Draw, Masks, OutOfMemory, Step, StepResult

BAD_LOGITS = "The model produced no usable numbers (NaN or infinity) for this request."
NO_MEMORY = "The device had no memory left to draw this request's next token."
T = TypeVar("T")
_LATE = Draw.LATE  # Members of enumerations are slow to read in Python 3.11.


@dataclass(slots=True)
class Launched:
    step: Step
    logits: torch.Tensor  # [R, vocab], valid until the next launch
    sample_chunks: list[int]  # the chunk of row i, see Batch
    draws: list[Chunk]  # the chunk of row i, cut after the token that the row follows
    prompt_rows: list[tuple[int, int, int]]  # see Batch
    waiting_rows: list[int]  # rows to be drawn later, by `draw`
    waiting_known: list[tuple[int, int]]  # prompt tokens that `draw` looks up, as in `Sampling`
    # On a CUDA device, these events record when the device had this step's inputs, and when the previous step ended.
    began: torch.cuda.Event | None
    ended_before: torch.cuda.Event | None
    samplings: list[tuple[list[int], PendingDraws]] = field(default_factory=list)  # each with the rows that it draws
    rows_without_memory: list[int] = field(default_factory=list)
    ended: torch.cuda.Event | None = None  # on CUDA: recorded when the results of all draws so far are on the host


class ModelRunner:
    """Runs steps on an executor, whose KV cache has blocks of `block_size` tokens.

    `sample_ids` replaces NumPy, see `Sampling`. `graphs` are captured from the executor, and run the steps that fit
    them. `tables` are the sequences' block tables on a GPU, which `graphs` also read. With `counts`, which has the same
    rows as the tables, `sample_ids` takes `edits`, as the one in `triton_sampling` does. `states` are needed if the
    model's layers have states.
    """

    def __init__(
        self,
        executor: Executor,
        device: torch.device,
        block_size: int,
        *,
        sample_ids: Callable[..., SampledIds] | None = None,
        graphs: Replays | None = None,
        tables: SequenceTables | None = None,
        counts: TokenCounts | None = None,
        states: KeptStates | None = None,
    ) -> None:
        self.is_asynchronous = device.type == "cuda"  # `launch` returns before the step has been computed
        self.executor = executor
        self._device = device
        self._block_size = block_size
        self._sample_ids = sample_ids
        self._graphs = graphs
        self._tables = tables
        self._counts = counts
        self._states = states
        self._adapters: dict[int, Adapter] = {}  # keyed by adapter number
        # The following fields describe the last launched step: the ids that it draws, the row of each sequence among
        # them, and the event when it ends.
        self._drawn_ids: torch.Tensor | None = None
        self._drawn_rows: dict[Sequence, int] = {}
        self._ended: torch.cuda.Event | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether a token's logits are bitwise the same in any step."""
        return self.executor.is_exact

    @property
    def counts_tokens(self) -> bool:
        """Return whether the device counts the tokens of sequences with penalties. See `Sequence.is_counted`."""
        return self._counts is not None

    @property
    def block_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the KV cache. Their first dimension is the block. A runner without blocks has none."""
        return self.executor.block_tensors

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """Add an adapter under an unused number above 0. Any thread may call this."""
        self._adapters[number] = self.executor.prepare(adapter)

    def drop_adapter(self, number: int) -> None:
        """Remove an adapter that no sequence uses. Only the thread that runs the steps may call this."""
        del self._adapters[number]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy the keys and values of blocks (from, to). Raises OutOfMemory before any block is copied."""
        _without_torch(lambda: self.executor.copy_blocks(copies))

    def launch(self, step: Step) -> Launched:
        """Launch a step, including the draws AT_LAUNCH. On CUDA, the host doesn't wait.

        Ids that the host doesn't have yet are read on the device, from the draws of the previous step. Raises
        OutOfMemory if the device has no memory for the step.
        """
        return _without_torch(lambda: self._launch(step))

    def _launch(self, step: Step) -> Launched:
        # The step begins when the device has its inputs. The time that the host takes to prepare them counts as the gap
        # before.
        began = torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else None
        adapters: list[Adapter | None] = []  # each chunk's adapter; empty if no chunk has one
        if self._adapters and any(chunk.sequence.adapter for chunk in step.chunks):
            numbers = [chunk.sequence.adapter for chunk in step.chunks]
            adapters = [self._adapters[number] if number else None for number in numbers]
        table_rows: list[int] | None = None
        if self._tables is not None:
            table_rows = self._tables.update(step)
        if self._states is not None:
            self._states.copy(step.state_copies)
        draws: list[Chunk] = []
        sample_chunks: list[int] = []
        for index, chunk in enumerate(step.chunks):
            _, _, _, max_draws, draft, _ = chunk
            if draft:
                several = chunk.draws()
                draws += several
                sample_chunks += [index] * len(several)
            elif max_draws:
                draws.append(chunk)
                sample_chunks.append(index)
        prompt_rows: list[tuple[int, int, int]] = []
        known: list[tuple[int, int]] = []
        replayed: PendingDraws | None = None
        size = None if self._graphs is None else self._graphs.find(step, adapters)
        if self._graphs is not None and size is not None:
            assert table_rows is not None
            inputs = draws, table_rows, self._drawn_ids, self._drawn_rows
            logits, replayed = self._graphs.launch(size, step, *inputs, began, adapters)
        else:
            batch = self._pack(step, table_rows)
            if began is not None:
                began.record()
            batch.adapters = adapters
            logits = self.executor.forward(batch)
            prompt_rows = batch.prompt_rows
            for index, _, count in prompt_rows:  # the prompt tokens that these rows predict
                sequence, start, *_ = step.chunks[index]
                num_top = sequence.params.prompt_logprobs or 0
                known += [(token_id, num_top) for token_id in sequence.token_ids[start + 1 : start + 1 + count]]
        waiting_rows: list[int] = []
        if replayed is None:
            waiting_rows = [row for row, draw in enumerate(draws) if draw.draw is _LATE]
        launched = Launched(step, logits, sample_chunks, draws, prompt_rows, waiting_rows, [], began, self._ended)
        if replayed is None:
            self._sample_what_can_be(launched, known)
        else:
            launched.samplings.append((list(range(len(draws))), replayed))
        if not launched.waiting_rows:
            self._keep_drawn(launched)
        return launched

    def _pack(self, step: Step, table_rows: list[int] | None) -> Batch:
        """Return the batch of a step, with the draws of the previous step and the states of its sequences."""
        tables: tuple[torch.Tensor, list[int]] | None = None
        if self._tables is not None and table_rows is not None:
            tables = self._tables.on_device, table_rows
        batch = build_batch(step, self._block_size, self._device, self._drawn_rows, tables)
        if len(batch.unknown_rows):
            assert self._drawn_ids is not None
            batch.input_ids[batch.unknown_rows] = self._drawn_ids[batch.drawn_rows]
        if self._states is not None:
            # The sequences of rehearsals have no state of their own, so they use any.
            parts = [StateChunk(chunk.sequence.state or 0, chunk.start, chunk.num_tokens) for chunk in step.chunks]
            batch.states = self._states.of_step(parts)
        return batch

    def _sample_what_can_be(self, launched: Launched, known: list[tuple[int, int]]) -> None:
        """Sample from all rows except those that wait for `draw`."""
        rows = list(range(len(launched.sample_chunks)))
        if launched.waiting_rows and not self.is_asynchronous:
            # The forward pass is complete, so all rows are drawn together, which saves copies of logits.
            launched.waiting_rows = rows
            launched.waiting_known = known
            return
        waiting = set(launched.waiting_rows)
        rows = [row for row in rows if row not in waiting]
        if rows or known or not waiting:
            self._sample(launched, rows, known)

    @torch.inference_mode()
    def draw(self, launched: Launched, masks: Masks | None = None) -> None:
        """Make the late draws that are still needed after the step has been settled."""
        if not launched.waiting_rows:
            return
        chunks = launched.step.chunks
        of_row = launched.sample_chunks
        rows = [row for row in launched.waiting_rows if chunks[of_row[row]].draw in (Draw.AT_LAUNCH, Draw.LATE)]
        try:
            self._sample(launched, rows, launched.waiting_known, masks)
        except torch.OutOfMemoryError:
            # Once rows are drawn, the step can't be launched again, so draw the rest row by row, which takes the least
            # memory.
            for row in rows:
                torch.cuda.empty_cache()
                try:
                    self._sample(launched, [row], masks=masks)
                except torch.OutOfMemoryError:
                    launched.rows_without_memory.append(row)
        self._keep_drawn(launched)

    def collect(self, launched: Launched) -> StepResult:
        results = [ChunkResult() for _ in launched.step.chunks]
        of_row = launched.sample_chunks
        draws = launched.draws
        known_logprobs = []
        for rows, sampling in launched.samplings:
            sampled = sampling.wait()
            for row, token_id, is_finite, logprobs in zip(
                rows, sampled.token_ids, sampled.are_finite, sampled.logprobs, strict=True
            ):
                result = results[of_row[row]]
                draft = draws[row][4]
                if draft and result.token_ids != [*draft]:
                    continue  # This token was drawn after a wrong draft.
                if is_finite:
                    result.token_ids.append(token_id)
                    if logprobs is not None:
                        result.logprobs = [*(result.logprobs or []), logprobs]
                elif not draft:  # The next step draws a draft's last token again, and then reports the error.
                    result.error = _why_not_finite(draws[row])
            known_logprobs += sampled.known_logprobs
        for row in launched.rows_without_memory:
            if not launched.draws[row].draft:
                results[launched.sample_chunks[row]].error = NO_MEMORY
        for index, first_row, num_rows in launched.prompt_rows:
            first = first_row - len(launched.sample_chunks)
            results[index].prompt_logprobs = known_logprobs[first : first + num_rows]
        return StepResult(
            results,
            device_ns=_ns_between(launched.began, launched.ended),
            device_gap_ns=_ns_between(launched.ended_before, launched.began),
        )

    def _sample(
        self, launched: Launched, rows: list[int], known: Sequenced[tuple[int, int]] = (), masks: Masks | None = None
    ) -> None:
        """Sample from these rows of the logits, and look up the prompt tokens `known` in the rows after all chunks."""
        logits = launched.logits
        num_rows = len(launched.sample_chunks)
        if len(rows) < num_rows:  # Sampling overwrites its logits, so it gets a copy.
            logits = take(logits, [*rows, *range(num_rows, num_rows + len(known))])
        chunks = [launched.draws[row] for row in rows]
        sample_ids = self._sample_ids
        if self._counts is not None and sample_ids is not None:
            sample_ids = partial(sample_ids, edits=self._counts.edits_of(chunks, masks))
        applies_masks = self._counts is None
        sampling = Sampling(logits, chunks, known, sample_ids, masks=masks, applies_masks=applies_masks)
        launched.samplings.append((rows, sampling))

    def _keep_drawn(self, launched: Launched) -> None:
        """Store the ids drawn in this step for the next step. All draws have been launched."""
        samplings = [sampling for _, sampling in launched.samplings]
        rows = [row for rows, _ in launched.samplings for row in rows]
        ids = [sampling.token_ids for sampling in samplings]
        self._drawn_ids = None
        if len(ids) == 1:
            self._drawn_ids = ids[0]
        elif ids:
            self._drawn_ids = torch.cat(ids)
        draws = launched.draws
        self._drawn_rows = {draws[row][0]: place for place, row in enumerate(rows)}
        # Read-backs arrive in launch order.
        self._ended = None
        if samplings:
            self._ended = samplings[-1].read_back.arrived
        launched.ended = self._ended


def _why_not_finite(chunk: Chunk) -> str:
    """Return why no token could be drawn. BAD_LOGITS may also mean that the sampling parameters exclude all tokens."""
    failed = chunk.sequence.failed_rule
    if failed is not None and failed[0] == chunk.known_end:
        return f"A sampling rule of the plug-in '{failed[1]}' failed on this request. The server's log says why."
    return BAD_LOGITS


def _without_torch(run: Callable[[], T]) -> T:
    """Call `run` and return its result. Raises OutOfMemory instead of torch's exception."""
    try:
        with torch.inference_mode():
            return run()
    except torch.OutOfMemoryError as error:
        reason = str(error)
    # By now, the exception is freed, and with it the tensors of the step, which its traceback referenced.
    torch.cuda.empty_cache()
    raise OutOfMemory(reason)


def _ns_between(begin: torch.cuda.Event | None, end: torch.cuda.Event | None) -> int | None:
    return None if begin is None or end is None else int(begin.elapsed_time(end) * 1e6)
